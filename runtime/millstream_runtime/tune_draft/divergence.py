"""How far a draft's distribution is from the target's: what the training makes smaller.

The forward Kullback-Leibler divergence of the draft q from the target p, summed over positions of the target's own
text, as in DistillSpec (Zhou et al. 2023, arXiv 2310.08461), where text of the model itself and a divergence from its
whole distribution raised acceptance most reliably:

    KL(p || q) = sum_v p(v) (log p(v) - log q(v))

Of p its most probable tokens are known, and the rest as one event:

    sum_{v in top} p(v) (log p(v) - log q(v)) + r (log r - log s),   r = 1 - sum_top p(v),   s = 1 - sum_top q(v)

That is the divergence of the same two distributions with all other tokens as one, hence at most KL(p || q), and equal
to it where the vocabulary has no others.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_REST = 1e-6  # of a probability, below which float32 knows nothing of a difference from 1


def divergence(logits: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> Tensor:
    """Return the sum over the rows, in nats.

    Args:
        logits: the draft's, `[rows, vocab]`. A token of `top_ids` beyond them counts to the rest.
        top_ids, top_logprobs: the target's most probable tokens, `[rows, top]`.
    """
    known = top_ids < logits.shape[1]
    log_p = top_logprobs.masked_fill(~known, -torch.inf)
    p = log_p.exp()
    log_q = logits.float().log_softmax(-1).gather(1, top_ids.where(known, 0))
    terms = torch.where(p > 0, p * (log_p.where(known, 0.0) - log_q), 0.0)
    if top_ids.shape[1] == logits.shape[1]:
        return terms.sum()
    rest_p = (1 - p.sum(1)).clamp(min=LEAST_REST)
    rest_q = (1 - log_q.exp().where(known, 0.0).sum(1)).clamp(min=LEAST_REST)
    return terms.sum() + (rest_p * (rest_p.log() - rest_q.log())).sum()
