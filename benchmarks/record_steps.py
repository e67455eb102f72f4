"""Record how long steps with drafts take on this machine, for the simulator of the governor.

    python -m benchmarks.record_steps    # writes results/recorded_steps.json; three minutes

Each number of drafts is an engine of its own; they answer in turns, so that other load meets all of them. Recorded are
steps of decodes alone in which all requests take part: drafting, computing and sampling.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.recorded_steps import PATH
from benchmarks.speculation import DEMO_DRAFT, DEMO_HEAD, DEMO_MODEL, MOST_TOKENS, Prompts, Side, conversation
from millstream_runtime.engine.request import Request, SamplingParams

LENGTHS = (0, 1, 2, 3, 4, 6, 8)  # drafts per decode
ROUNDS = 3


class Workload(NamedTuple):
    """What is recorded. `draft`: a draft model or head; None: n-grams."""

    name: str
    draft: Path | None
    num_requests: int


WORKLOADS = (
    Workload("n-grams at 4", None, 4),
    Workload("draft model at 1", DEMO_DRAFT, 1),
    Workload("draft model at 4", DEMO_DRAFT, 4),
    Workload("EAGLE head at 1", DEMO_HEAD, 1),
    Workload("EAGLE head at 4", DEMO_HEAD, 4),
)
Steps = list[tuple[int, float]]  # tokens and seconds of each


def record(workload: Workload, prompts: Prompts) -> dict[str, Any]:
    """Answer all prompts with each number of drafts, in turns."""
    sides = {
        length: Side(DEMO_MODEL, length, draft=workload.draft, max_num_seqs=workload.num_requests) for length in LENGTHS
    }
    steps: dict[int, Steps] = {length: [] for length in LENGTHS}
    for turn in range(ROUNDS + 1):
        for length, side in sides.items():
            side.engine._policy.threads = sides[0].engine.threads  # type: ignore[misc]  # as in `speculation.compare`
            found = _answer(side, prompts, workload.num_requests)
            if turn:  # the first warms up
                steps[length] += found
    first = steps[1]
    stood = sum(tokens for tokens, _ in first) / (len(first) * workload.num_requests) - 1
    return {
        "name": workload.name,
        "num_requests": workload.num_requests,
        "is_free": workload.draft is None,
        "acceptance": round(stood, 3),
        "milliseconds": {length: sorted(round(1000 * took, 2) for _, took in steps[length]) for length in LENGTHS},
    }


def _answer(side: Side, prompts: Prompts, num_requests: int) -> Steps:
    sampling, steps = SamplingParams(MOST_TOKENS, temperature=0.0), []
    for start in range(0, len(prompts), num_requests):
        for number, prompt in enumerate(prompts[start : start + num_requests]):
            side.engine.add_request(Request(f"{start}-{number}", prompt, sampling))
        while side.engine.has_work():
            began = time.perf_counter()
            outputs = side.engine.step()
            took = time.perf_counter() - began
            is_whole = len({output.request_id for output in outputs}) == num_requests
            if is_whole and all(output.prefill is None for output in outputs):
                steps.append((len(outputs), took))
    return steps


def main() -> None:
    """Record, print the means, save."""
    first, again = conversation(DEMO_MODEL)
    workloads = []
    for workload in WORKLOADS:
        found = record(workload, (again if workload.draft is None else first) * workload.num_requests)
        means = {length: round(sum(times) / len(times), 2) for length, times in found["milliseconds"].items()}
        print(
            f"{workload.name:20} acceptance {found['acceptance']:.2f}  mean milliseconds by drafts {means}", flush=True
        )
        workloads.append(found)
    PATH.write_text(json.dumps({"machine": machine.describe(), "workloads": workloads}) + "\n")


if __name__ == "__main__":
    main()
