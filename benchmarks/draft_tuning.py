"""What `millstream tune-draft` gains on a kind of work that the draft never read: the demo pair and code.

    python -m benchmarks.draft_tuning                # at most 20 minutes on two cores; saves results/draft_tuning.json
    python -m benchmarks.draft_tuning --steps 20     # a try, saves nothing

The draft learned prose and chat alone. It is tuned on code that its target was trained on, with prose and chat as
`--general`, and judged by the documents of `models/held_out.jsonl`, which neither of the two ever saw. The goals: the
share of drafts of code that stand gains LEAST_GAIN_POINTS, no other slice loses more than MOST_LOSS_POINTS, and it all
takes at most MOST_MINUTES on two cores. Exit status 1: one of them is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.quantization_quality import write_calibration
from benchmarks.speculation import DEMO_DRAFT, DEMO_MODEL, MODELS
from hack.training.corpus.documents import CODE, SLICES
from hack.training.held_out import NAME
from millstream_runtime.tune_draft.settings import TuneSettings
from millstream_runtime.tune_draft.tune import tune

RESULT = Path(__file__).parent / "results" / "draft_tuning.json"
LEAST_GAIN_POINTS, MOST_LOSS_POINTS, MOST_MINUTES = 10.0, 2.0, 20
SEQUENCE_TOKENS, ANSWER_TOKENS = 256, 96  # the pair was trained on rows of 256 tokens


def settings_of(scratch: Path, steps: int | None, minutes: int | None) -> TuneSettings:
    """Write the documents; return what is asked for, the defaults of the command where nothing is said."""
    documents = write_calibration(scratch)
    general = scratch / "general.jsonl"
    others = [documents[name].read_text(encoding="utf-8") for name in SLICES if name != CODE]
    general.write_text("".join(others), encoding="utf-8")
    return TuneSettings(
        target=DEMO_MODEL, draft=DEMO_DRAFT, data=documents[CODE], out=scratch / "tuned", general=general,
        held_out=MODELS / NAME, steps=steps, minutes=None if steps else minutes, temperature=1.0,
        answer_tokens=ANSWER_TOKENS, sequence_tokens=SEQUENCE_TOKENS, max_documents=2000, rows=16, learning_rate=None,
        draft_tokens=5, seed=0, device="cpu",
    )  # fmt: skip


def missed_goals(found: dict[str, Any]) -> list[str]:
    """Say which goals are missed, one sentence each."""
    missed = [] if found["minutes"] <= MOST_MINUTES else [f"it took {found['minutes']} minutes of {MOST_MINUTES}"]
    for one in found["report"]["slices"]:
        points = one["gain_points"]["value"]
        if one["slice"] == CODE and points < LEAST_GAIN_POINTS:
            missed.append(f"{CODE} gained {points:.1f} points of {LEAST_GAIN_POINTS:g}")
        if one["slice"] != CODE and points < -MOST_LOSS_POINTS:
            missed.append(f"{one['slice']} lost {-points:.1f} points; {MOST_LOSS_POINTS:g} are allowed")
    return missed


def main() -> int:
    """Tune, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=MOST_MINUTES - 1, help="limit of the run (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="this number of steps instead; saves nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        settings = settings_of(Path(scratch), args.steps, args.minutes)
        began, processor_began = time.monotonic(), time.process_time()
        tuned = tune(settings, lambda sentence: print(sentence, flush=True), lambda stage, done, total: None)
        minutes = (time.monotonic() - began) / 60
        processor_minutes = (time.process_time() - processor_began) / 60
    if tuned is None:
        raise RuntimeError("a new folder is there already")
    found: dict[str, Any] = {
        "what": "a draft model tuned on code by `millstream tune-draft`, judged on held-out documents by slice",
        "machine": machine.describe(),
        "minutes": round(minutes, 1),
        "processor_minutes": round(processor_minutes, 1),
        "report": tuned.report,
    }
    found["missed_goals"] = missed_goals(found)
    for one in tuned.report["slices"]:
        before, after, points = one["before"], one["after"], one["gain_points"]
        print(
            f"{one['slice']:8} {before['percent']:.1f} % -> {after['percent']:.1f} %, points "
            f"{points['value']:.1f} ({points['low']:.1f} to {points['high']:.1f})"
        )
    print(f"{minutes:.1f} minutes, {processor_minutes:.1f} of processor time", *found["missed_goals"], sep="\n")
    if not args.steps:
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(bool(found["missed_goals"]))


if __name__ == "__main__":
    sys.exit(main())
