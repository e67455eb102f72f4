"""The simulator does what its page says, and the goals that it can show hold on a few traces."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gateway_simulator.replica import PrefixCache, SimulatedReplica, Speed
from benchmarks.gateway_simulator.scenarios import ORACLE, SCENARIOS, Scenario, simulate
from benchmarks.gateway_simulator.simulation import Outcome, run
from benchmarks.gateway_simulator.table import table
from benchmarks.gateway_simulator.trace import Shape, Turn, trace
from millstream_gateway.pick import Policy

SPEED = Speed(0.010, 0.001, 0.002, step_tokens=100, max_num_seqs=4, cache_tokens=10_000)
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "gateway_simulator.json"
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def turn(conversation: int, number: int, prompt_tokens: int, answer_tokens: int, at_seconds: float = 0.0) -> Turn:
    made = trace(1, 1.0, Shape(turns=1), seed=conversation)[0]
    request = replace(made.request, request_id=f"{conversation}-{number}")
    return Turn(conversation, number, at_seconds, prompt_tokens, 0, answer_tokens, request)


def test_one_request_takes_the_steps_of_its_prompt_and_then_one_per_token() -> None:
    replica = SimulatedReplica("here", SPEED)
    outcome = run([turn(1, 0, prompt_tokens=150, answer_tokens=11)], [replica], lambda one, now: 0)
    assert outcome.ttft_seconds == pytest.approx([0.010 + 0.100 + 0.010 + 0.050])
    assert outcome.seconds == pytest.approx(outcome.ttft_seconds[0] + 10 * 0.012)
    assert outcome.busy_seconds == pytest.approx([outcome.seconds])


def test_a_second_turn_computes_what_the_first_left_out_and_a_request_waits_for_the_step_before_it() -> None:
    replica = SimulatedReplica("here", SPEED)
    turns = [turn(1, 0, 90, 6), turn(1, 1, 120, 2, at_seconds=1.0), turn(2, 0, 50, 2, at_seconds=1.001)]
    outcome = run(turns, [replica], lambda one, now: 0)
    assert outcome.cached_tokens == 96  # 90 + 6: six blocks of 16
    second, other = outcome.ttft_seconds[1:]
    assert second == pytest.approx(0.010 + 0.024)
    assert other == pytest.approx(second - 0.001 + 0.010 + 0.050 + 0.002)  # the second turn decodes meanwhile


def test_the_oracle_knows_the_time_of_a_first_token() -> None:
    replica = SimulatedReplica("here", SPEED)
    replica.submit(turn(1, 0, 150, 3), 0.0)
    late = turn(2, 0, 80, 3, at_seconds=0.05)
    expected = replica.ttft_seconds(late, 0.05)
    outcome = run([turn(1, 0, 150, 3), late], [SimulatedReplica("here", SPEED)], lambda one, now: 0)
    assert outcome.ttft_seconds[1] == pytest.approx(expected, abs=0.0021)  # without the first request's decode


def test_the_cache_evicts_the_oldest_conversation_from_its_end_and_never_one_that_runs() -> None:
    cache = PrefixCache(320)
    for conversation in (1, 2):
        cache.hold(turn(conversation, 0, 128, 32))
        cache.release(turn(conversation, 0, 128, 32))
    cache.hold(turn(3, 0, 32, 16))
    cached = [cache.cached_tokens(turn(conversation, 1, 1000, 1)) for conversation in (1, 2)]
    assert cached == [160 - 48, 160]
    assert cache.can_hold(turn(4, 0, 270, 2))
    assert not cache.can_hold(turn(4, 0, 270, 3))


def test_every_policy_answers_the_same_requests() -> None:
    scenario = BY_NAME["conversations"]
    turns = scenario.turns(0)
    assert len(turns) == 3 * 8 * 6
    assert [one.arrives_at_seconds for one in turns] == sorted(one.arrives_at_seconds for one in turns)
    outcomes = [simulate(scenario, turns, policy, 1, 0) for policy in (*Policy, ORACLE)]
    assert {outcome.prompt_tokens for outcome in outcomes} == {sum(one.prompt_tokens for one in turns)}
    assert {len(outcome.ttft_seconds) for outcome in outcomes} == {len(turns)}


def outcomes_of(scenario: Scenario, seeds: int, *contenders: tuple[Policy | str, int]) -> list[list[Outcome]]:
    """Outcomes of each contender, by seed."""
    traces = [scenario.turns(seed) for seed in range(seeds)]
    return [
        [simulate(scenario, turns, policy, pickers, seed) for seed, turns in enumerate(traces)]
        for policy, pickers in contenders
    ]


def test_a_conversation_stays_on_its_replica_also_with_three_pickers() -> None:
    one, three, round_robin = outcomes_of(
        BY_NAME["conversations"],
        7,
        (Policy.PREDICTED_TTFT, 1),
        (Policy.PREDICTED_TTFT, 3),
        (Policy.ROUND_ROBIN, 1),
    )
    cached = [
        statistics.median(outcome.cached_tokens for outcome in outcomes) for outcomes in (one, three, round_robin)
    ]
    assert cached[0] >= 1.8 * cached[2]
    assert cached[1] >= 0.95 * cached[0]


def test_a_hot_prefix_loads_no_replica_much_more_than_the_others() -> None:
    (outcomes,) = outcomes_of(BY_NAME["one hot prefix"], 3, (Policy.PREDICTED_TTFT, 1))
    assert statistics.median(outcome.most_loaded_ratio for outcome in outcomes) <= 1.3


def test_without_a_shared_prefix_nobody_waits_longer_than_with_least_requests() -> None:
    ours, least_requests = outcomes_of(
        BY_NAME["no shared prefix"], 5, (Policy.PREDICTED_TTFT, 1), (Policy.LEAST_REQUESTS, 1)
    )
    ratios = [a.p95_ttft_seconds / b.p95_ttft_seconds for a, b in zip(ours, least_requests, strict=True)]
    assert statistics.median(ratios) <= 1.05


def test_eight_replicas_are_near_the_oracle_and_ahead_of_round_robin() -> None:
    ours, round_robin, oracle = outcomes_of(
        BY_NAME["8 replicas"], 1, (Policy.PREDICTED_TTFT, 1), (Policy.ROUND_ROBIN, 1), (ORACLE, 1)
    )
    assert ours[0].p95_ttft_seconds <= 0.8 * round_robin[0].p95_ttft_seconds
    assert ours[0].mean_ttft_seconds <= 1.1 * oracle[0].mean_ttft_seconds


def test_the_committed_results_are_of_scenarios_that_exist() -> None:
    saved = [one["scenario"] for one in json.loads(RESULTS.read_text(encoding="utf-8"))["results"]]
    assert saved == [scenario.name for scenario in SCENARIOS if scenario.name in saved]
    assert len(saved) >= 5


def test_the_page_has_the_table_of_the_committed_results() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "gateway.md").read_text(encoding="utf-8")
    assert table(json.loads(RESULTS.read_text(encoding="utf-8"))["results"]) in page
