"""Whether a slice passes: limits by workload, and the figures that are beyond them. Pure.

A slice fails where the value itself is beyond its limit. Where only the interval reaches beyond it, the slice passes,
and the report says that more documents would tell. One slice that fails fails the model: a mean over slices hides the
one that got worse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.quality.documents import TokenizedDocument
from millstream_runtime.quality.slice_figures import Figure, SliceFigures

MIN_DOCUMENTS, MIN_TOKENS = 20, 1000  # of a slice: with fewer, one document moves a percentage by points


class Workload(StrEnum):
    """How much a change may cost. In code and mathematics one wrong token spoils an answer."""

    GENERAL = "general"
    STRICT = "strict"


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one slice; the field of a figure is its name with `max_` or `min_` before it."""

    max_mean_kl: float
    max_p99_kl: float
    min_top1_agreement_percent: float
    max_flip_percent: float
    max_perplexity_ratio: float

    def replaced(self, given: Mapping[str, float]) -> Limits:
        """These limits with some of them given by the user."""
        return Limits(**{field.name: given.get(field.name, getattr(self, field.name)) for field in fields(self)})


LIMITS = {
    Workload.GENERAL: Limits(0.05, 1.0, 95.0, 3.0, 1.03),
    Workload.STRICT: Limits(0.02, 0.5, 98.0, 2.0, 1.02),
}
STRICT_SLICES = ("code", "math")


@dataclass(frozen=True, slots=True)
class SliceVerdict:
    """`failures` and `unsure` are sentences; the slice passes where there is no failure."""

    figures: SliceFigures
    workload: Workload
    limits: Limits
    failures: tuple[str, ...]
    unsure: tuple[str, ...]

    @property
    def passes(self) -> bool:
        return not self.failures


def judge(figures: SliceFigures, workload: Workload | None, given: Mapping[str, float]) -> SliceVerdict:
    """Judge a slice; `workload` None: by its name. `given`: limits of the user's own, by field."""
    chosen = workload or (Workload.STRICT if figures.slice in STRICT_SLICES else Workload.GENERAL)
    limits = LIMITS[chosen].replaced(given)
    failures, unsure = [], []
    if figures.num_not_finite:
        failures.append(f"{figures.num_not_finite} of {figures.num_tokens} tokens have logits that are not finite")
    for field in fields(limits):
        kind, name = field.name.split("_", 1)
        limit, figure = getattr(limits, field.name), getattr(figures, name)
        words = f"{name} {figure.value:.4g} ({figure.low:.4g} to {figure.high:.4g}), limit {limit:g}"
        if _is_beyond(kind, figure.value, limit):
            failures.append(words)
        elif _is_beyond(kind, _worst(kind, figure), limit):
            unsure.append(words)
    return SliceVerdict(figures, chosen, limits, tuple(failures), tuple(unsure))


def check_enough(documents: Sequence[TokenizedDocument]) -> None:
    """Raises InvalidConfigError: a slice has too little data to judge anything by."""
    num_documents = Counter(one.slice for one in documents)
    num_tokens = Counter[str]()
    for one in documents:
        num_tokens[one.slice] += one.num_judged_tokens
    for name, count in num_documents.items():
        if count < MIN_DOCUMENTS or num_tokens[name] < MIN_TOKENS:
            raise InvalidConfigError(
                f"Slice {name!r} has {count} documents with {num_tokens[name]} tokens to judge; the least are "
                f"{MIN_DOCUMENTS} documents and {MIN_TOKENS} tokens per slice. Add documents, or join slices."
            )


def _is_beyond(kind: str, value: float, limit: float) -> bool:
    return not value <= limit if kind == "max" else not value >= limit


def _worst(kind: str, figure: Figure) -> float:
    return figure.high if kind == "max" else figure.low
