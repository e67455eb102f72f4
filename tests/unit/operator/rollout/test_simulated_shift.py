"""Over fixed seeds a shift judges rightly: no more wrong verdicts than its design allows, at any rate of requests."""

from __future__ import annotations

from collections import Counter
from statistics import median

import pytest

from millstream_operator.api.load import parse
from tests.support.llmdeployments import manifest
from tests.support.simulated_shift import Outcome, Pods, run_shift

OWNER = parse(manifest(replicas=4, rollout={"onInsufficientEvidence": "Hold"}))
OLD = Pods()
CASES: dict[str, tuple[Pods, str]] = {
    "identical": (OLD, "passed"),
    "3 % over 1 % errors": (Pods(error_rate=0.03), "worse"),
    "2.5 times the time per token": (Pods(token_seconds=2.5 * OLD.token_seconds), "worse"),
}
WRONG = {"passed": "worse", "worse": "passed"}
MOST_WRONG = 5  # of 500, where the design allows 0.5 %


def outcomes(case: str, requests_per_second: float, seeds: range) -> list[Outcome]:
    new = CASES[case][0]
    return [run_shift(OWNER, new, OLD, requests_per_second=requests_per_second, seed=seed) for seed in seeds]


def row(case: str, requests_per_second: float, found: list[Outcome]) -> str:
    """One row of the table in docs/rollouts.md."""
    counts = Counter(one.verdict for one in found)
    right = [one for one in found if one.verdict == CASES[case][1]]
    figures = [f"{counts[verdict]}" for verdict in ("passed", "worse", "held")]
    medians = [f"{median(sizes):,.0f}" for sizes in ([o.new_requests for o in right], [o.old_requests for o in right])]
    return f"| {case} | {requests_per_second} | {' | '.join((*figures, *medians))} |"


@pytest.mark.parametrize("case", CASES)
def test_a_few_seeds_are_judged_rightly(case: str) -> None:
    found = outcomes(case, 50, range(500, 510))
    assert {one.verdict for one in found} == {CASES[case][1]}, found


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("requests_per_second", [50, 5])
@pytest.mark.parametrize("case", CASES)
def test_no_more_verdicts_are_wrong_than_the_design_allows(case: str, requests_per_second: int) -> None:
    found = outcomes(case, requests_per_second, range(500))
    print(row(case, requests_per_second, found))
    wrong = [one for one in found if one.verdict == WRONG[CASES[case][1]]]
    assert len(wrong) <= MOST_WRONG, wrong[:3]
    assert sum(one.verdict == "held" for one in found) <= 50, "holding is no verdict, and must stay the exception"
