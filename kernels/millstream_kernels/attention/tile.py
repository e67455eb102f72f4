"""One tile of attention: rows of queries over some tokens, added to a running softmax in base 2.

    s = scale * log2(e) * q k^T       or, with a soft cap c,  c * log2(e) * tanh(scale / c * q k^T)
    m' = max(m, max s)    p = 2^(s - m')    l' = l * 2^(m - m') + sum p    a' = a * 2^(m - m') + p v

A row that has seen nothing yet has m = -inf, and 2^(-inf - -inf) is NaN: its maximum counts as 0 until it has one, so
that a tile of which it sees nothing leaves it as it was, to the bit. The same holds for every row that a tile is masked
for: its sums depend on its own tokens and on where tiles begin, never on the rows next to it.

Keys and values in 8 bits enter the products as codes, which are exact in every type of a query. Nothing is dequantized:

    e4m3   one scale per head, in `scale` for keys and on a' at the end for values; both with a factor of 256, because

               e4m3 code    s eeee mmm      << 8, << 7      float16  s 0eeee mmm0000000  = value / 256

           which takes no instruction that sm_80 lacks. Subnormal codes are subnormal float16s, and exact
    int8   a scale per token j and head:   s_j * key scale_j,   and p_j * value scale_j in place of p_j before p v

The second product is one of float16 where queries are bfloat16: it holds every code and every scale of int8 exactly,
keeps three more bits of p, and e4m3 is one already.

A code that is no number makes a float16 that is none; so does a scale that is not finite.

Milakov and Gimelshein 2018 (arXiv 1805.02867), Dao et al. 2022 (arXiv 2205.14135).
"""

from __future__ import annotations

import triton
import triton.language as tl

from millstream_kernels.stored_as import StoredAs

LOG2_E = 1.4426950408889634
# Powers of two, so that nothing is rounded. E4M3: what `numbers_of` leaves out. INT8: on the scales of values, taken
# out of the result again: a float16 of p_j * scale_j would else be subnormal, with few bits, where values are small.
# Values up to a million do not overflow.
FACTORS = {StoredAs.NUMBERS: 1.0, StoredAs.INT8: 8.0, StoredAs.E4M3: 256.0}


@triton.jit
def token_slots(table, tokens, is_token, PAGE: tl.constexpr):
    """Slots in the pool of `tokens`, int64: a pool may have more numbers than an int32 counts."""
    pages = tl.load(table + tokens // PAGE, mask=is_token, other=0)
    return pages.to(tl.int64) * PAGE + tokens % PAGE


@triton.jit
def numbers_of(stored, DTYPE: tl.constexpr, STORED_AS: tl.constexpr):
    """What is stored as numbers of a query's type: codes of int8 as they are, of e4m3 as 1 / 256 of their value."""
    if STORED_AS == 0:
        return stored
    if STORED_AS == 1:
        return stored.to(DTYPE)
    bits = stored.to(tl.int16)
    magnitude = bits & 0x7F
    no_number = ((magnitude + 1) & 0x80) << 7  # of 0x7f alone: with it all bits of the exponent are set
    return (((bits & 0x80) << 8) | (magnitude << 7) | no_number).to(tl.float16, bitcast=True).to(DTYPE)


@triton.jit
def values_of(stored, DTYPE: tl.constexpr, STORED_AS: tl.constexpr):
    """The same for the second product: of codes float16 where a query has 16 bits."""
    if STORED_AS == 0:
        result = stored
    else:
        if DTYPE.primitive_bitwidth == 32:  # an `elif` would be decided when it runs
            result = numbers_of(stored, DTYPE, STORED_AS)
        else:
            result = numbers_of(stored, tl.float16, STORED_AS)
    return result


@triton.jit
def token_scales(scales, slots, is_token):
    """Of codes in int8, float32 `[tokens]`, 0 for others than `is_token`. NaN for a scale that is not finite: infinity
    would give scores of minus infinity, and the token would not be missed."""
    found = tl.load(scales + slots, mask=is_token, other=0.0).to(tl.float32)
    return tl.where(tl.abs(found) < float("inf"), found, float("nan"))


@triton.jit
def scores_of(query, keys, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """`[rows, tokens]` in base 2. `scale`: times log2(e), with a soft cap times 2 * log2(e) / softcap, times the keys'
    scales `[1, tokens]` where they have them; `softcap`: times log2(e)."""
    scores = tl.dot(query, keys, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = softcap - 2.0 * softcap / (tl.exp2(scores) + 1.0)  # tanh by an exponential that cannot be NaN
    return scores


@triton.jit
def attend_tile(maximum, total, attended, scores, values, value_scales=None):
    """The running softmax of `[rows]`, `[rows]`, `[rows, D]` after a tile; scores that are not seen are -inf.

    `value_scales`: float32 `[tokens]`, what the rows of `values` are multiplied by.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    kept = tl.exp2(maximum - reference)
    weights = tl.exp2(scores - reference[:, None])
    total = total * kept + tl.sum(weights, 1)
    attended = attended * kept[:, None]
    if value_scales is not None:
        weights = weights * value_scales[None, :]
    attended = tl.dot(weights.to(values.dtype), values, attended, input_precision="ieee")
    return new_maximum, total, attended
