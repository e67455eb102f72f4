"""A comparison as one JSON document; `page` draws it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from millstream_runtime.quality.judged_files import JudgedFile
from millstream_runtime.quality.token_scores import DocumentScores
from millstream_runtime.quality.verdict import SliceVerdict

CURVE_POINTS = 100
PASSED, FAILED = "passed", "failed"


@dataclass(frozen=True, slots=True)
class JudgedModel:
    """One side."""

    path: str
    weights_bytes: int
    kv_cache_dtype: str
    files: tuple[JudgedFile, ...]


@dataclass(frozen=True, slots=True)
class JudgedData:
    """The file of documents, as it was when it was read."""

    path: str
    sha256: str
    documents_repeated: int  # lines left out, each of which repeats another one


@dataclass(frozen=True, slots=True)
class WorstAnswer:
    """A document where the models differ most, and what each writes behind its prompt."""

    line: int
    slice: str
    mean_kl: float
    prompt: str  # its end
    expected: str
    base: str
    candidate: str


def build(
    base: JudgedModel,
    candidate: JudgedModel,
    data: JudgedData,
    scores: Sequence[DocumentScores],
    verdicts: Sequence[SliceVerdict],
    worst: Sequence[WorstAnswer],
) -> dict[str, Any]:
    """The document: the verdict first, then what it stands on."""
    return {
        "what": "a candidate against its base, on held-out documents",
        "verdict": PASSED if all(one.passes for one in verdicts) else FAILED,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "base": asdict(base),
        "candidate": asdict(candidate),
        "data": {
            **asdict(data),
            "documents": len(scores),
            "tokens": sum(len(one.kl) for one in scores),
            "documents_cut": sum(one.document.is_cut for one in scores),
        },
        "slices": [{"passes": one.passes, **asdict(one)} for one in verdicts],
        "kl_curves": {one.figures.slice: _curve(scores, one.figures.slice) for one in verdicts},
        "worst_answers": [asdict(one) for one in worst],
    }


def worst_documents(scores: Sequence[DocumentScores], count: int) -> list[DocumentScores]:
    """Those of the highest mean KL; one that is not finite comes first."""
    return sorted(scores, key=lambda one: -np.nan_to_num(one.kl.mean(), nan=np.inf))[:count]


def _curve(scores: Sequence[DocumentScores], name: str) -> list[float]:
    """KL at CURVE_POINTS equal steps of the distribution of tokens, ascending."""
    values = np.concatenate([one.kl for one in scores if one.document.slice == name])
    finite = values[np.isfinite(values)]
    if not len(finite):
        return []
    return [float(f"{value:.3g}") for value in np.quantile(finite, np.linspace(0, 1, CURVE_POINTS))]
