"""`tuning.json` and the model card: acceptance before and after by slice, and whether the draft is better. Pure.

No date and no path of the machine, so that the same run gives the same files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from millstream_runtime.quality.slice_figures import INTERVAL_PERCENT
from millstream_runtime.tune_draft.acceptance import Stands, acceptance, gain
from millstream_runtime.tune_draft.training import MOST_LOSS_POINTS

VERSION = 1
BETTER, NOT_BETTER = "better", "not better"
SUMMARY_VERSION = 1
MAX_SUMMARY_BYTES = 4096  # of a container's termination message
MAX_REASONS, MAX_REASON_CHARACTERS = 4, 160


def report(stands: Sequence[Stands], draft_tokens: int, seed: int, settings: Mapping[str, object]) -> dict[str, Any]:
    """Return the document.

    The draft is better where it gained on the answers to the data's prompts, interval and all, and no slice lost more
    than MOST_LOSS_POINTS.
    """
    names = dict.fromkeys(one.slice for one in stands if one.is_answer)
    slices = [_slice([one for one in stands if one.slice == name], draft_tokens, seed) for name in names]
    own = _slice([one for one in stands if not one.is_general], draft_tokens, seed)
    reasons = []
    if own["gain_points"]["low"] <= 0:
        reasons.append(
            f"acceptance on the data gained {own['gain_points']['value']:.2f} points, and the interval of "
            f"{INTERVAL_PERCENT} % begins at {own['gain_points']['low']:.2f}"
        )
    reasons += [
        f"slice {one['slice']} lost {-one['gain_points']['value']:.2f} points; {MOST_LOSS_POINTS:g} are allowed"
        for one in slices
        if one["gain_points"]["value"] < -MOST_LOSS_POINTS
    ]
    return {
        "version": VERSION,
        "verdict": NOT_BETTER if reasons else BETTER,
        "reasons": reasons,
        "settings": dict(settings),
        "draft_tokens_per_check": draft_tokens,
        "data": own,
        "slices": slices,
    }


def summary(found: Mapping[str, Any]) -> str:
    """Return verdict, reasons and the slices' figures as one line of JSON, for a container's termination message.

    Slices that lost most come first; what does not fit is left out, and counted by `slices_left_out`.
    """
    slices = sorted(found["slices"], key=lambda one: float(one["gain_points"]["value"]))
    kept = [_summarized(one) for one in slices]
    while True:
        left_out = len(slices) - len(kept)
        reasons = [words[:MAX_REASON_CHARACTERS] for words in found["reasons"][:MAX_REASONS]]
        answer = {"version": SUMMARY_VERSION, "event": "tuned", "verdict": found["verdict"], "reasons": reasons}
        line = json.dumps(answer | {"slices": kept, "slices_left_out": left_out}, ensure_ascii=False)
        if len(line.encode()) <= MAX_SUMMARY_BYTES or not kept:
            return line
        kept.pop()


def _summarized(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "slice": one["slice"],
        "answers": one["answers"],
        "before_percent": one["before"]["percent"],
        "after_percent": one["after"]["percent"],
        "gain_points": one["gain_points"]["value"],
    }


def card(name: str, draft: str, target: str, found: Mapping[str, Any]) -> str:
    """Return README.md."""
    lines = [
        f"# {name}",
        "",
        f"`{draft}`, a draft model for speculative decoding, tuned for `{target}` with",
        "`millstream tune-draft`: trained on the target's own answers and distributions.",
        "",
        "| setting | value |",
        "|---|---|",
        *(f"| {key.replace('_', ' ')} | {value} |" for key, value in found["settings"].items()),
        "",
        "## Acceptance",
        "",
        f"**{found['verdict']}**, on held-out prompts (`tuning.json`). Acceptance is the share of positions of the",
        "target's answers where the draft's most probable token is the target's. In brackets: drafts that stand per",
        f"check of {found['draft_tokens_per_check']}. Intervals are of {INTERVAL_PERCENT} %.",
        "",
        "| slice | answers | tokens | before | after | points gained |",
        "|---|---|---|---|---|---|",
    ]
    for one in found["slices"]:
        points = one["gain_points"]
        lines.append(
            f"| {one['slice']} | {one['answers']} | {one['tokens']} | {_cell(one['before'])} | {_cell(one['after'])} | "
            f"{points['value']:+.1f} ({points['low']:+.1f} to {points['high']:+.1f}) |"
        )
    lines += [f"\n{reason[0].upper()}{reason[1:]}." for reason in found["reasons"]]
    return "\n".join(lines) + "\n"


def _cell(figures: Mapping[str, float]) -> str:
    return f"{figures['percent']:.1f} % ({figures['accepted_tokens_per_check']:.2f})"


def _slice(stands: Sequence[Stands], draft_tokens: int, seed: int) -> dict[str, Any]:
    answers = [one for one in stands if one.is_answer]
    return {
        "slice": answers[0].slice,
        "general": all(one.is_general for one in answers),
        "answers": len(answers),
        "tokens": sum(len(one.before) for one in answers),
        "before": _rounded(asdict(acceptance(stands, draft_tokens, after=False))),
        "after": _rounded(asdict(acceptance(stands, draft_tokens, after=True))),
        "gain_points": _rounded(asdict(gain(stands, seed))),
    }


def _rounded(figures: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 4) for name, value in figures.items()}
