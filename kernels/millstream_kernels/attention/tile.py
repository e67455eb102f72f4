"""One tile of attention: rows of queries over some tokens, added to a running softmax in base 2.

    s = scale * log2(e) * q k^T       or, with a soft cap c,  c * log2(e) * tanh(scale / c * q k^T)
    m' = max(m, max s)    p = 2^(s - m')    l' = l * 2^(m - m') + sum p    a' = a * 2^(m - m') + p v

A row that has seen nothing yet has m = -inf, and 2^(-inf - -inf) is NaN: its maximum counts as 0 until it has one, so
that a tile of which it sees nothing leaves it as it was, to the bit. The same holds for every row that a tile is masked
for: its sums depend on its own tokens and on where tiles begin, never on the rows next to it.

Milakov and Gimelshein 2018 (arXiv 1805.02867), Dao et al. 2022 (arXiv 2205.14135).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def token_slots(table, tokens, is_token, PAGE: tl.constexpr):
    """Slots in the pool of `tokens`, int64: a pool may have more numbers than an int32 counts."""
    pages = tl.load(table + tokens // PAGE, mask=is_token, other=0)
    return pages.to(tl.int64) * PAGE + tokens % PAGE


@triton.jit
def scores_of(query, keys, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """`[rows, tokens]` in base 2. `scale`: times log2(e), with a soft cap times 2 * log2(e) / softcap; `softcap`: times
    log2(e)."""
    scores = tl.dot(query, keys, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = softcap - 2.0 * softcap / (tl.exp2(scores) + 1.0)  # tanh by an exponential that cannot be NaN
    return scores


@triton.jit
def attend_tile(maximum, total, attended, scores, values):
    """The running softmax of `[rows]`, `[rows]`, `[rows, D]` after a tile; scores that are not seen are -inf."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    kept = tl.exp2(maximum - reference)
    weights = tl.exp2(scores - reference[:, None])
    total = total * kept + tl.sum(weights, 1)
    attended = attended * kept[:, None]
    attended = tl.dot(weights.to(values.dtype), values, attended, input_precision="ieee")
    return new_maximum, total, attended
