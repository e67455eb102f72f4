"""Time to the first token and between tokens under 16 and 64 clients with mixed requests, here and in another checkout.

    git worktree add ../before <commit>
    python -m benchmarks.mixed_latency --baseline ../before
    python -m benchmarks.mixed_latency --target-itl 20 200        # other values of --target-itl-milliseconds

Each side is a process of its own with an engine on the demo model (`mixed_latency_worker`), without HTTP. Within a
round the sides take turns with the same requests, and each round starts with another side. The result holds, per side,
the medians of the rounds' percentiles, and the ratio of each side to the first. Two goals are judged for each side of
this checkout: its p99 between tokens is at most 4 times its median, and its median is at most its target.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.latency_goals import Goal, ratio_goal, show, target_goal
from millstream_runtime.config import DEFAULT_CPU_TARGET_ITL_MILLISECONDS

HERE = Path(__file__).parent
RESULT = HERE / "results" / "mixed_latency.json"
DEMO_MODEL = HERE.parent / "models" / "demo-chat"
PACKAGES = ("operator", "runtime", "cli", "kernels")
REQUESTS_PER_CLIENT = {16: 4, 64: 2}
PERCENTILES = {"ttft": (50, 95), "itl": (50, 99, 99.9)}


class Side:
    """An engine of one checkout with some settings."""

    def __init__(self, name: str, checkout: Path, settings: dict[str, Any]) -> None:
        self.name = name
        path = os.pathsep.join(str(checkout / package) for package in PACKAGES)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "mixed_latency_worker.py"), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._receive()

    def run(self, clients: int, seed: int) -> dict[str, float]:
        """One round, as milliseconds per percentile and tokens per second."""
        asked = {"clients": clients, "per_client": REQUESTS_PER_CLIENT.get(clients, 2), "seed": seed}
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        found = self._receive()
        milliseconds = {
            f"{kind}_p{percent}_ms": 1e3 * percentile(found[kind], percent)
            for kind, percents in PERCENTILES.items()
            for percent in percents
        }
        return milliseconds | {"tokens_per_second": found["tokens_per_second"]}

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: its engine ended with status {self._process.wait()}")
        received: dict[str, Any] = json.loads(line)
        return received


def percentile(values: list[float], percent: float) -> float:
    """The nearest rank."""
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def measure(sides: list[Side], clients: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians over rounds, by side."""
    runs: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for side in sides:
        side.run(clients, seed=rounds)  # what is measured before a load has settled
    for round_ in range(rounds):
        turn = round_ % len(sides)
        for side in sides[turn:] + sides[:turn]:
            runs[side.name].append(side.run(clients, seed=round_))
    return {
        name: {key: round(statistics.median(one[key] for one in mine), 2) for key in mine[0]}
        for name, mine in runs.items()
    }


def compare(clients: int, medians: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Add the ratios to the first side, and print all."""
    first, *others = medians
    ratios = {
        name: {key: round(medians[name][key] / value, 3) for key, value in medians[first].items()} for name in others
    }
    print(f"\n  {clients} clients{'':9}" + "".join(f"{key:>19}" for key in medians[first]))
    for name, values in medians.items():
        print(f"    {name:16}" + "".join(f"{value:>19.1f}" for value in values.values()))
    for name, values in ratios.items():
        print(f"    {name + ' / ' + first:16.16}" + "".join(f"{value:>19.2f}" for value in values.values()), flush=True)
    return {"medians": medians, f"ratio_to_{first}": ratios}


def judge(clients: int, medians: dict[str, dict[str, float]], targets_ms: dict[str, int]) -> list[Goal]:
    """Both goals for the sides in `targets_ms`."""
    goals = []
    for name, target_ms in targets_ms.items():
        where, found = f"{clients} clients, {name}", medians[name]
        goals.append(ratio_goal(where, found["itl_p99_ms"], found["itl_p50_ms"]))
        goals.append(target_goal(where, found["itl_p50_ms"], target_ms))
    return goals


def main(argv: list[str] | None = None) -> None:
    """Parse flags, run, save."""
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixed_latency", description=summary)
    parser.add_argument("--baseline", type=Path, help="another checkout, measured in the same run")
    parser.add_argument("--target-itl", type=int, nargs="*", default=[], metavar="MS", help="more sides, with these")
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count each engine's own processor time on one thread: for a machine that is shared with other work",
    )
    args = parser.parse_args(argv)
    settings: dict[str, Any] = {"model": str(DEMO_MODEL), "processor_time": args.processor_time}
    sides = [Side("baseline", args.baseline.resolve(), settings)] if args.baseline is not None else []
    sides.append(Side("here", HERE.parent, settings))
    sides += [
        Side(f"target {ms} ms", HERE.parent, settings | {"target_itl_milliseconds": ms}) for ms in args.target_itl
    ]
    report: dict[str, Any] = {"machine": machine.describe(), "model": DEMO_MODEL.name, "rounds": args.rounds}
    report["clock"] = "processor time of one thread" if args.processor_time else "wall"
    targets_ms = {"here": DEFAULT_CPU_TARGET_ITL_MILLISECONDS} | {f"target {ms} ms": ms for ms in args.target_itl}
    for clients in args.clients:
        medians = measure(sides, clients, args.rounds)
        goals = judge(clients, medians, targets_ms)
        report[f"{clients}-clients"] = compare(clients, medians) | {"goals": goals}
        show(goals)
    for side in sides:
        side.close()
    args.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"saved {args.output}")


if __name__ == "__main__":
    main()
