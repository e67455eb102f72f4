"""Which drafts stand: figures from the draft's most probable tokens and the tokens that the target wrote. Pure.

A draft is the draft model's most probable token, and it stands where it is the token that the target draws in its
place (docs/speculation.md). On the target's own answer that can be read off without decoding again: as long as drafts
stand, what the draft model reads is that answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millstream_runtime.quality.slice_figures import INTERVAL_PERCENT, NUM_RESAMPLES


@dataclass(frozen=True, slots=True)
class Stands:
    """Of one sequence: for each position whether the draft's token is that of the sequence, before and after."""

    slice: str
    is_general: bool
    is_answer: bool
    before: np.ndarray  # bool [positions]
    after: np.ndarray


@dataclass(frozen=True, slots=True)
class Gain:
    """Points of acceptance, after less before, with its interval of INTERVAL_PERCENT."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class AcceptanceFigures:
    """Of the answers of a slice, or of all.

    Attributes:
        percent: of the positions, where a draft stands.
        accepted_tokens_per_check: drafts that stand in a check, of `draft_tokens` at most.
        text_percent: of the positions of the documents' own texts; None without any.
    """

    percent: float
    accepted_tokens_per_check: float
    text_percent: float | None


def acceptance(stands: Sequence[Stands], draft_tokens: int, *, after: bool) -> AcceptanceFigures:
    """Return the figures before or after. `stands`: with an answer at least."""
    answers = [one.after if after else one.before for one in stands if one.is_answer]
    texts = [one.after if after else one.before for one in stands if not one.is_answer]
    accepted, checks = np.sum([accepted_and_checks(one, draft_tokens) for one in answers], axis=0)
    return AcceptanceFigures(
        percent=_percent(answers),
        accepted_tokens_per_check=float(accepted / max(1, checks)),
        text_percent=_percent(texts) if texts else None,
    )


def accepted_and_checks(stands: np.ndarray, draft_tokens: int) -> tuple[int, int]:
    """Return how many drafts stand when an answer is decoded with `draft_tokens` per check, and the checks.

    A check accepts the drafts up to the first that does not stand, and gives one token more.
    """
    accepted = checks = place = 0
    while place < len(stands):
        run = stands[place : place + draft_tokens]
        stood = len(run) if run.all() else int(run.argmin())
        accepted, checks, place = accepted + stood, checks + 1, place + stood + 1
    return accepted, checks


def gain(stands: Sequence[Stands], seed: int) -> Gain:
    """Return the gain on answers, its interval from drawing whole answers again (see `slice_figures`)."""
    answers = [one for one in stands if one.is_answer]
    lengths = np.array([len(one.before) for one in answers], dtype=np.float64)
    gained = np.array([one.after.sum() - one.before.sum() for one in answers], dtype=np.float64)
    draws = np.random.default_rng(seed).multinomial(
        len(answers), np.full(len(answers), 1 / len(answers)), NUM_RESAMPLES
    )
    values = 100 * (draws @ gained) / np.maximum(1, draws @ lengths)
    tail = (100 - INTERVAL_PERCENT) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return Gain(float(100 * gained.sum() / max(1, lengths.sum())), float(low), float(high))


def _percent(stands: Sequence[np.ndarray]) -> float:
    return float(100 * sum(one.sum() for one in stands) / max(1, sum(len(one) for one in stands)))
