"""How two models predict the same tokens, number by number: what the figures of a slice are made from.

KL is Kullback-Leibler's divergence of the candidate's distribution from the base's, in nats, over the whole
vocabulary, in float64: of two nearly equal distributions it is a small difference of large sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from millstream_runtime.quality.documents import TokenizedDocument
from millstream_runtime.quality.scored_model import Slab

COMPARED_BYTES = 8 << 20  # of float32 logits of a model at a time: in float64 there are six times two of them


@dataclass(frozen=True, slots=True)
class DocumentScores:
    """Of one document, one entry per judged token; `[tokens]` each.

    Attributes:
        kl: float64, nats; not finite where the candidate's logits are not.
        base_nll, candidate_nll: float64, nats of the document's own token.
        agrees: bool, both models have the same most probable token.
        flips: bool, exactly one of them has the document's own token as the most probable one.
    """

    document: TokenizedDocument
    kl: np.ndarray
    base_nll: np.ndarray
    candidate_nll: np.ndarray
    agrees: np.ndarray
    flips: np.ndarray


class Logits(Protocol):
    """A model, or what is known of it."""

    def logits(self, token_ids: Sequence[int], first: int) -> Iterator[Slab]:
        """Those that predict `token_ids[first:]`, ascending; of two models with one vocabulary in equal slabs."""


def score(base: Logits, candidate: Logits, document: TokenizedDocument) -> DocumentScores:
    """Compare the models on one document."""
    first = document.num_prompt_tokens
    pieces = []
    for ours, theirs in zip(
        base.logits(document.token_ids, first), candidate.logits(document.token_ids, first), strict=True
    ):
        targets = document.token_ids[ours.first : ours.first + len(ours.logits)]
        rows = max(1, COMPARED_BYTES // (4 * ours.logits.shape[1]))
        for start in range(0, len(targets), rows):
            piece = slice(start, start + rows)
            pieces.append(_compare(ours.logits[piece], theirs.logits[piece], targets[piece]))
    columns = [np.concatenate(column) for column in zip(*pieces, strict=True)]
    return DocumentScores(document, *columns)


def _compare(base: Tensor, candidate: Tensor, targets: Sequence[int]) -> list[np.ndarray]:
    """`[rows, vocab]` each, and the tokens that they predict."""
    target = torch.tensor(targets, device=base.device).unsqueeze(1)
    log_p = base.double().log_softmax(-1)
    log_q = candidate.double().log_softmax(-1)
    # A token that the base rules out (-inf) adds nothing: 0 * (-inf - x) would be NaN.
    terms = torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q))
    best_p, best_q = base.argmax(-1, keepdim=True), candidate.argmax(-1, keepdim=True)
    columns = (
        terms.sum(-1),
        -log_p.gather(1, target).squeeze(1),
        -log_q.gather(1, target).squeeze(1),
        (best_p == best_q).squeeze(1),
        ((best_p == target) != (best_q == target)).squeeze(1),
    )
    return [column.cpu().numpy() for column in columns]
