"""Goodput of each number of drafts, by requests at once and by acceptance, and where the governor stands among them.

    python -m benchmarks.goodput          # a table
    python -m benchmarks.goodput --save   # also to results/goodput.json and docs/pictures/goodput.svg; two minutes

No model runs: steps take what `governor_simulator.ONE_CALL` says, a model of a 135 M shape on a CPU, of drafts that
cost nothing; each draft stands with the same probability. The ratio is tokens per second over those without drafts. All
settings meet the same answers; the governor begins behind the warm-up of an engine.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from benchmarks.goodput_plot import svg
from benchmarks.governor_simulator import ONE_CALL, Fixed, Phase, even, simulate, warm_up
from millstream_runtime.engine.speculation.governor import Governor

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/goodput.json"
PICTURE = ROOT / "docs/pictures/goodput.svg"
LENGTHS, BATCHES, ACCEPTANCES = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (0.3, 0.5, 0.7, 0.9)
ANSWERS, ANSWER_TOKENS = 40, 200  # per request at once


def cell(acceptance: float, batch: int, answers: int = ANSWERS) -> dict[str, Any]:
    """Return the ratios of one acceptance and number of requests, and the mean length that the governor checked."""
    rng, most = random.Random(f"{acceptance}/{batch}"), max(LENGTHS)
    phases = [Phase(batch, [even(acceptance, rng, ANSWER_TOKENS) for _ in range(answers * batch)])]
    off, *fixed = (simulate(phases, Fixed(length), ONE_CALL, most).seconds for length in (0, *LENGTHS))
    governor = Governor(most)
    warm_up(governor, ONE_CALL, most)
    run = simulate(phases, governor, ONE_CALL, most)
    checked = sum(num_drafts for *_, num_drafts in run.timeline)
    return {
        "acceptance": acceptance,
        "batch": batch,
        "ratios": {str(length): round(off / seconds, 3) for length, seconds in zip(LENGTHS, fixed, strict=True)},
        "governor": round(off / run.seconds, 3),
        "governor_drafts_per_decode": round(checked / (len(run.timeline) * batch), 2),
    }


def main() -> None:
    """Simulate, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    cells = []
    for acceptance in ACCEPTANCES:
        for batch in BATCHES:
            cells.append(cell(acceptance, batch))
            print(json.dumps(cells[-1]), flush=True)
    if args.save:
        found = {"step_times": "modelled: 135 M, attention in one call, drafts that cost nothing", "cells": cells}
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
        PICTURE.write_text(svg(found))


if __name__ == "__main__":
    main()
