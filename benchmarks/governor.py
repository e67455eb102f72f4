"""The governor of draft lengths in simulated decoding: what it takes, against each fixed length.

    python -m benchmarks.governor           # every scenario with each cost of steps, as a table
    python -m benchmarks.governor --save    # also to results/governor.json

Regret is the time with the governor over the time with the best fixed length, less one. The best is known only
afterwards, so a governor that chooses per request may be below zero. The times of steps are a model of what was
measured (see `governor_simulator.Costs`); no model runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.governor_simulator import DEMO_DRAFT, DEMO_NGRAM, ONE_CALL, Costs, Fixed, Phase, scenarios, simulate
from millstream_runtime.engine.speculation.governor import Governor

RESULT = Path(__file__).parent / "results" / "governor.json"
MOST = 4
# Costs of steps, and whether drafts that are not checked can be compared with what comes, as those of n-grams are.
SETTINGS = {
    "demo pair, n-grams": (DEMO_NGRAM, True),
    "demo pair, draft model": (DEMO_DRAFT, False),
    "135 M, attention in one call, n-grams": (ONE_CALL, True),
}


def measure(phases: list[Phase], costs: Costs, *, compares_unchecked: bool) -> dict[str, float]:
    """Return the seconds of each fixed length and of the governor, and what it lost to trials."""
    fixed = [simulate(phases, Fixed(length), costs, MOST).seconds for length in range(MOST + 1)]
    governor = Governor(MOST, compares_unchecked=compares_unchecked)
    run = simulate(phases, governor, costs, MOST, compares_unchecked=compares_unchecked)
    found = {f"fixed_{length}_seconds": round(seconds, 2) for length, seconds in enumerate(fixed)}
    return found | {
        "governor_seconds": round(run.seconds, 2),
        "regret": round(run.seconds / min(fixed) - 1, 4),
        "speedup_over_off": round(fixed[0] / run.seconds, 3),
        "exploration_share": round(governor.stats().exploration_seconds / run.seconds, 4),
        "flips": governor.stats().flips,
    }


def main() -> None:
    """Simulate, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    results = []
    for setting, (costs, compares_unchecked) in SETTINGS.items():
        for scenario, phases in scenarios().items():
            found = measure(phases, costs, compares_unchecked=compares_unchecked)
            results.append({"setting": setting, "scenario": scenario, **found})
            regret, trials = 100 * found["regret"], 100 * found["exploration_share"]
            gain = found["speedup_over_off"]
            print(
                f"{setting:40}{scenario:28}regret {regret:6.1f} %  over off {gain:5.2f}  trials {trials:4.2f} %",
                flush=True,
            )
    if args.save:
        RESULT.write_text(json.dumps({"max_draft_tokens": MOST, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
