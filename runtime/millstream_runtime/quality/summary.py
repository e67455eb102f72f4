"""The verdict, the digests of what was read and the figures of each slice in at most 4 KiB: what a container's
termination message holds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from millstream_runtime.quality.judged_files import JudgedFile, digest_of

VERSION = 1
MAX_BYTES = 4096  # of a container's termination message
MAX_FAILURE_CHARACTERS = 160
MAX_NAMES, MAX_NAME_CHARACTERS = 3, 64  # of files that were not read whole for their digest
FIGURES = ("mean_kl", "p99_kl", "top1_agreement_percent", "flip_percent", "perplexity_ratio")


def summary(report: Mapping[str, Any]) -> str:
    """Return one line of JSON. `report`: of `report.build`. Slices that failed come first; what does not fit is left
    out, and counted by `slices_left_out`. A figure that is not finite is null."""
    slices = sorted(report["slices"], key=lambda one: not one["failures"])
    kept = [_slice(one) for one in slices]
    files = {side: _files(report[side]["files"]) for side in ("base", "candidate")}
    judged = {"verdict": report["verdict"], "files": files | {"data": {"sha256": report["data"]["sha256"]}}}
    while True:
        line = _line(judged, kept, len(slices) - len(kept))
        if len(line.encode()) <= MAX_BYTES or not kept:
            return line
        kept.pop()


def _line(judged: Mapping[str, Any], slices: list[dict[str, Any]], left_out: int) -> str:
    return json.dumps(
        {"version": VERSION, "event": "judged", **judged, "slices": slices, "slices_left_out": left_out},
        ensure_ascii=False,
    )


def _files(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One digest of all files of a side. `sampled`: how many were not read whole for it; `sampled_files`: the first."""
    files = [JudgedFile(**one) for one in found]
    sampled = [file.name for file in files if not file.is_whole]
    return {
        "sha256": digest_of(files),
        "files": len(files),
        "bytes": sum(file.size_bytes for file in files),
        "sampled": len(sampled),
        "sampled_files": [name[:MAX_NAME_CHARACTERS] for name in sampled[:MAX_NAMES]],
    }


def _slice(one: Mapping[str, Any]) -> dict[str, Any]:
    figures = one["figures"]
    return {
        "slice": figures["slice"],
        "documents": figures["num_documents"],
        "tokens": figures["num_tokens"],
        **{name: _rounded(figures[name]["value"]) for name in FIGURES},
        "failures": [words[:MAX_FAILURE_CHARACTERS] for words in one["failures"]],
    }


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
