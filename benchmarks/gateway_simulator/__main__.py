"""Simulate all scenarios, print the medians, and save them with `--save` to benchmarks/results/gateway_simulator.json.

cached/RR      cached prompt tokens, as a ratio to those of RoundRobin
p95/RR, p95/LR 95th percentile of TTFT, as a ratio to that of RoundRobin and of LeastRequests
3 pickers      what three pickers behind a Service reach of the cached tokens of one
most loaded    busy seconds of the most loaded replica over the mean
regret         mean TTFT over that of the greedy oracle, which knows all caches and queues, minus 1
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gateway_simulator.scenarios import LOAD, ORACLE, SCENARIOS, Scenario, simulate
from benchmarks.gateway_simulator.simulation import REPORT_SECONDS, Outcome
from benchmarks.gateway_simulator.table import table
from millstream_gateway.pick import Policy

RESULT = Path(__file__).parents[1] / "results" / "gateway_simulator.json"
SEEDS = 20
CONTENDERS: dict[str, tuple[Policy | str, int]] = {
    "one": (Policy.PREDICTED_TTFT, 1),
    "three": (Policy.PREDICTED_TTFT, 3),
    "round_robin": (Policy.ROUND_ROBIN, 1),
    "least_requests": (Policy.LEAST_REQUESTS, 1),
    "most_free_kv": (Policy.MOST_FREE_KV, 1),
    "oracle": (ORACLE, 1),
}
Outcomes = Mapping[str, Outcome]
RATIOS: dict[str, Callable[[Outcomes], float]] = {
    "cached_over_round_robin": lambda of: _ratio(of["one"].cached_tokens, of["round_robin"].cached_tokens),
    "cached_of_three_over_one": lambda of: _ratio(of["three"].cached_tokens, of["one"].cached_tokens),
    "cached_of_oracle_over_round_robin": lambda of: _ratio(of["oracle"].cached_tokens, of["round_robin"].cached_tokens),
    "p95_over_round_robin": lambda of: of["one"].p95_ttft_seconds / of["round_robin"].p95_ttft_seconds,
    "p95_of_three_over_round_robin": lambda of: of["three"].p95_ttft_seconds / of["round_robin"].p95_ttft_seconds,
    "p95_over_least_requests": lambda of: of["one"].p95_ttft_seconds / of["least_requests"].p95_ttft_seconds,
    "p95_of_three_over_least_requests": lambda of: of["three"].p95_ttft_seconds / of["least_requests"].p95_ttft_seconds,
    "p95_of_most_free_kv_over_round_robin": lambda of: (
        of["most_free_kv"].p95_ttft_seconds / of["round_robin"].p95_ttft_seconds
    ),
    "most_loaded": lambda of: of["one"].most_loaded_ratio,
    "most_loaded_of_three": lambda of: of["three"].most_loaded_ratio,
    "regret": lambda of: of["one"].mean_ttft_seconds / of["oracle"].mean_ttft_seconds - 1,
    "regret_of_three": lambda of: of["three"].mean_ttft_seconds / of["oracle"].mean_ttft_seconds - 1,
    "mean_belief_error_tokens": lambda of: statistics.fmean(map(abs, of["one"].belief_error_tokens)),
}


def _ratio(tokens: int, others_tokens: int) -> float:
    """Return 1 where both have cached nothing, as without any shared prefix."""
    return tokens / others_tokens if others_tokens else 1.0


def measure(scenario: Scenario, seeds: int) -> dict[str, Any]:
    """Return the medians over the seeds."""
    found: dict[str, list[float]] = {name: [] for name in RATIOS}
    for seed in range(seeds):
        turns = scenario.turns(seed)
        outcomes = {
            name: simulate(scenario, turns, policy, pickers, seed) for name, (policy, pickers) in CONTENDERS.items()
        }
        for name, ratio in RATIOS.items():
            found[name].append(ratio(outcomes))
    medians = {name: round(statistics.median(values), 3) for name, values in found.items()}
    return {"scenario": scenario.name, "replicas": scenario.num_replicas, "seeds": seeds, **medians}


def main() -> None:
    """Simulate, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help=f"traces per scenario (default: {SEEDS})")
    parser.add_argument(
        "--only", choices=[one.name for one in SCENARIOS], action="append", help="these scenarios alone"
    )
    parser.add_argument("--save", action="store_true", help="replace these scenarios in the committed results")
    parser.add_argument("--table", action="store_true", help="print the table of docs/gateway.md, and simulate nothing")
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(RESULT.read_text(encoding="utf-8"))["results"]))
        return
    for scenario in SCENARIOS:
        if given.only and scenario.name not in given.only:
            continue
        result = measure(scenario, given.seeds)
        print(json.dumps(result, indent=1), flush=True)
        if given.save:
            _save(result)


def _save(result: dict[str, Any]) -> None:
    saved = json.loads(RESULT.read_text(encoding="utf-8"))["results"] if RESULT.exists() else []
    by_name = {one["scenario"]: one for one in [*saved, result]}
    results = [by_name[scenario.name] for scenario in SCENARIOS if scenario.name in by_name]
    document = {"load": LOAD, "report_seconds": REPORT_SECONDS, "results": results}
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
