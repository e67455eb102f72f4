"""The governor of draft lengths in simulated decoding: what it takes, against each fixed length.

    python -m benchmarks.governor           # every scenario with each cost of steps, as a table
    python -m benchmarks.governor --save    # also to results/governor.json

Regret is the time with the governor over the time with the best fixed length, less one. The best is known only
afterwards, so a governor that chooses per request may be below zero. No model runs: the times of steps are a model of
what was measured (see `governor_simulator.Costs`), or were recorded (see `recorded_steps`). Before the first request a
governor has what the warm-up of an engine gives it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from benchmarks.governor_simulator import (
    DEMO_DRAFT,
    DEMO_NGRAM,
    ONE_CALL,
    Fixed,
    Phase,
    Run,
    StepSeconds,
    even,
    scenarios,
    simulate,
    warm_up,
)
from benchmarks.recorded_steps import RecordedSteps, read
from millstream_runtime.engine.speculation.drafting import WARM_UP_BATCHES
from millstream_runtime.engine.speculation.governor import Governor

RESULT = Path(__file__).parent / "results" / "governor.json"
MOST, MOST_RECORDED = 4, 8
RECORDED_ANSWERS, RECORDED_TOKENS = 100, 90  # per request at once: half a minute of decoding
# Costs of steps, and whether drafts that are not checked can be compared with what comes, as those of n-grams are.
SETTINGS = {
    "demo pair, n-grams": (DEMO_NGRAM, True),
    "demo pair, draft model": (DEMO_DRAFT, False),
    "135 M, attention in one call, n-grams": (ONE_CALL, True),
}


def govern(
    phases: list[Phase],
    costs: StepSeconds,
    most: int,
    *,
    compares_unchecked: bool,
    batches: Seq[int] = WARM_UP_BATCHES,
    seed: int = 0,
    reading_seconds: float = 0.0,
) -> tuple[Run, Governor]:
    """Answer all requests with a governor that was warmed up. `batches`, `seed`: of the warm-up. `reading_seconds`: of
    each request before its first drafts, by a draft model."""
    governor = Governor(most, compares_unchecked=compares_unchecked)
    warm_up(governor, costs, most, batches, seed)
    run = simulate(
        phases, governor, costs, most, compares_unchecked=compares_unchecked, reading_seconds=reading_seconds
    )
    return run, governor


def measure(
    phases: list[Phase],
    costs: StepSeconds,
    lengths: list[int],
    *,
    compares_unchecked: bool,
    batches: Seq[int] = WARM_UP_BATCHES,
    seed: int = 0,
    reading_seconds: float = 0.0,
) -> dict[str, float]:
    """Return the seconds of each fixed length and of a governor (see `govern`), and what it lost to trials."""
    most = max(lengths)
    fixed = {
        length: simulate(phases, Fixed(length), costs, most, reading_seconds=reading_seconds).seconds
        for length in lengths
    }
    run, governor = govern(
        phases,
        costs,
        most,
        compares_unchecked=compares_unchecked,
        batches=batches,
        seed=seed,
        reading_seconds=reading_seconds,
    )
    found = {f"fixed_{length}_seconds": round(seconds, 2) for length, seconds in fixed.items()}
    return found | {
        "governor_seconds": round(run.seconds, 2),
        "regret": round(run.seconds / min(fixed.values()) - 1, 4),
        "speedup_over_off": round(fixed[0] / run.seconds, 3),
        "exploration_share": round(governor.stats().exploration_seconds / run.seconds, 4),
        "flips": governor.stats().flips,
    }


def measure_recorded(recorded: RecordedSteps, seed: int = 1, reading_seconds: float = 0.0) -> dict[str, float]:
    """The same with recorded steps."""
    rng, size = random.Random(seed), recorded.num_requests
    answers = [even(recorded.acceptance, rng, RECORDED_TOKENS) for _ in range(RECORDED_ANSWERS * size)]
    return measure(
        [Phase(size, answers)],
        recorded,
        [0, 1, 2, 4, MOST_RECORDED],
        compares_unchecked=recorded.is_free,
        batches=[size],  # steps of others were not recorded
        seed=seed,
        reading_seconds=reading_seconds,
    )


def main() -> None:
    """Simulate, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for setting, (costs, compares_unchecked) in SETTINGS.items():
        for scenario, phases in scenarios().items():
            found = measure(phases, costs, [*range(MOST + 1)], compares_unchecked=compares_unchecked)
            results.append({"setting": setting, "scenario": scenario, "max_draft_tokens": MOST, **found})
            _print(results[-1])
    for recorded in read():
        found = measure_recorded(recorded)
        results.append(
            {"setting": "recorded steps", "scenario": recorded.name, "max_draft_tokens": MOST_RECORDED, **found}
        )
        _print(results[-1])
    if args.save:
        RESULT.write_text(json.dumps({"results": results}, indent=1) + "\n")


def _print(found: dict[str, Any]) -> None:
    regret, trials, gain = 100 * found["regret"], 100 * found["exploration_share"], found["speedup_over_off"]
    print(
        f"{found['setting']:40}{found['scenario']:28}"
        f"regret {regret:6.1f} %  over off {gain:5.2f}  trials {trials:4.2f} %",
        flush=True,
    )


if __name__ == "__main__":
    main()
