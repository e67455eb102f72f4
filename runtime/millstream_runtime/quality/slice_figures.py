"""The figures of each slice, with intervals: arithmetic on arrays, no model.

Tokens of one document depend on each other, so an interval comes from drawing whole documents again (the bootstrap of
clusters: Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 3.8). Draws are seeded: the same
scores give the same intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millstream_runtime.quality.token_scores import DocumentScores

NUM_RESAMPLES = 1000
INTERVAL_PERCENT = 95
TAIL_PERCENT = 99
MAX_NATS = 700.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A value and its interval of INTERVAL_PERCENT."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SliceFigures:
    """Of all documents of a slice.

    Attributes:
        mean_kl, p99_kl: nats per token.
        top1_agreement_percent: of tokens, both models have the same most probable one.
        flip_percent: of tokens that exactly one of the models gets right.
        perplexity_ratio: the candidate's perplexity divided by the base's.
        num_not_finite: tokens where a logit of a model is NaN or infinite; the other figures leave them out.
    """

    slice: str
    num_documents: int
    num_tokens: int
    num_not_finite: int
    base_perplexity: float
    candidate_perplexity: float
    mean_kl: Figure
    p99_kl: Figure
    top1_agreement_percent: Figure
    flip_percent: Figure
    perplexity_ratio: Figure


def by_slice(scores: Sequence[DocumentScores], seed: int = 0) -> list[SliceFigures]:
    """Return the figures of every slice, in the order in which the slices first appear."""
    names = list(dict.fromkeys(one.document.slice for one in scores))
    return [figures_of(name, [one for one in scores if one.document.slice == name], seed) for name in names]


def figures_of(name: str, scores: Sequence[DocumentScores], seed: int = 0) -> SliceFigures:
    """Return the figures of the documents of one slice."""
    finite = [np.isfinite(one.kl) & np.isfinite(one.base_nll) & np.isfinite(one.candidate_nll) for one in scores]
    columns = np.array(
        [
            (
                keep.sum(),
                one.kl[keep].sum(),
                one.agrees[keep].sum(),
                one.flips[keep].sum(),
                one.base_nll[keep].sum(),
                one.candidate_nll[keep].sum(),
            )
            for one, keep in zip(scores, finite, strict=True)
        ],
        dtype=np.float64,
    )
    draws = np.random.default_rng(seed).multinomial(len(scores), np.full(len(scores), 1 / len(scores)), NUM_RESAMPLES)
    # The first row counts each document once: it gives the values, the others give the intervals.
    counts = np.vstack([np.ones((1, len(scores)), dtype=draws.dtype), draws])
    tokens, kl, agreed, flipped, base, candidate = (counts @ columns).T
    tokens = np.maximum(tokens, 1)
    lengths = [int(keep.sum()) for keep in finite]
    all_kl = np.concatenate([one.kl[keep] for one, keep in zip(scores, finite, strict=True)])
    return SliceFigures(
        slice=name,
        num_documents=len(scores),
        num_tokens=sum(len(one.kl) for one in scores),
        num_not_finite=sum(int((~keep).sum()) for keep in finite),
        base_perplexity=float(_exp(base[0] / tokens[0])),
        candidate_perplexity=float(_exp(candidate[0] / tokens[0])),
        mean_kl=_figure(kl / tokens),
        p99_kl=_figure(_quantiles(all_kl, lengths, counts, TAIL_PERCENT / 100)),
        top1_agreement_percent=_figure(100 * agreed / tokens),
        flip_percent=_figure(100 * flipped / tokens),
        perplexity_ratio=_figure(_exp((candidate - base) / tokens)),
    )


def _exp(nats: np.ndarray) -> np.ndarray:
    """At most e^MAX_NATS, since JSON has no infinity: a model that is broken can be thousands of nats off."""
    values: np.ndarray = np.exp(np.minimum(nats, MAX_NATS))
    return values


def _figure(values: np.ndarray) -> Figure:
    """The first value, and the interval of the others."""
    tail = (100 - INTERVAL_PERCENT) / 2
    low, high = np.percentile(values[1:], [tail, 100 - tail])
    return Figure(float(values[0]), float(low), float(high))


def _quantiles(values: np.ndarray, lengths: Sequence[int], counts: np.ndarray, quantile: float) -> np.ndarray:
    """Of `values` where those of document d count `counts[i, d]` times: the smallest that reaches the share, by i."""
    if not len(values):
        return np.zeros(len(counts))
    order = np.argsort(values)
    documents = np.repeat(np.arange(len(lengths)), lengths)[order]
    ascending = values[order]
    found = np.empty(len(counts))
    for index, row in enumerate(counts):
        below = np.cumsum(row[documents])
        found[index] = ascending[min(np.searchsorted(below, quantile * below[-1]), len(values) - 1)]
    return found
