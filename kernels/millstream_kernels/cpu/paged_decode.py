"""Attention of decodes over paged keys and values on a CPU, computed in float32, one query per row.

    score(t)  = scale * q . k(t)                      for the tokens t that the row sees; capped if asked for
    weight(t) = exp(score(t) - m) / sum of the same   m: the largest score
    output    = sum over t of weight(t) * v(t)

Work: 4 * H * D * L operations per row; 8 * KV * D * L bytes of keys and values, read once, block by block, wherever the
blocks lie. A row's sums are in the order of its tokens and know no other row: it has one result, whatever its company.
A latent key (MLA) is one head for all queries, and its first numbers are the value.

What made it quick, in this order: keys and values of four tokens at a time, so that a query's numbers, and those of the
output, are loaded once for four; an exponential that is vectorized (a polynomial, as in Cephes' expf); heads outside,
rows inside, as the pool has them. torch's kernel multiplies matrices of two or three rows for the same, and reads rows
up to the longest of a call.

This is Python that numba compiles (`hack.kernels.prebuild_cpu`): nothing else imports it. It allocates nothing and
raises nothing, since its caller is no Python.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from millstream_kernels.cpu.intrinsics import (
    OPTIONS,
    SIGNATURE,
    bytes_at,
    exp,
    float32s,
    int32s,
    int64s,
    uint16s,
)
from millstream_kernels.cpu.stored_numbers import to_float32
from millstream_kernels.cpu.task import NUM_FIELDS, Field, Format

# Plain integers: numba takes globals for constants, but no members of an enumeration.
_QUERY, _POOL, _OUTPUT, _BLOCKS, _STARTS, _LENGTHS, _CUTS, _SCRATCH = (field.value for field in list(Field)[:8])
_SCALES, _FORMAT, _ROWS, _GROUPS, _GROUP, _HEAD_SIZE = (field.value for field in list(Field)[8:14])
_SLOTS, _BLOCK_SIZE, _WINDOW, _SCORES, _PARTS, _SCALE, _SOFTCAP = (field.value for field in list(Field)[14:21])
_KEY_HEADS, _VALUE_HEADS, _VALUE_SIZE = (field.value for field in list(Field)[21:])
_FLOAT32 = Format.FLOAT32.value


@njit(**OPTIONS)
def _score(query, keys, scores, group, dim, width, column, num_tokens):
    """Scores of `num_tokens` tokens of a block: `keys` `[num_tokens * dim]`, from `column` on of `scores`."""
    token = 0
    while token + 4 <= num_tokens:
        first = keys[token * dim : (token + 1) * dim]
        second = keys[(token + 1) * dim : (token + 2) * dim]
        third = keys[(token + 2) * dim : (token + 3) * dim]
        fourth = keys[(token + 3) * dim : (token + 4) * dim]
        for head in range(group):
            own = query[head * dim : (head + 1) * dim]
            sum1 = sum2 = sum3 = sum4 = np.float32(0)
            for i in range(dim):
                number = own[i]
                sum1 += number * first[i]
                sum2 += number * second[i]
                sum3 += number * third[i]
                sum4 += number * fourth[i]
            place = head * width + column + token
            scores[place] = sum1
            scores[place + 1] = sum2
            scores[place + 2] = sum3
            scores[place + 3] = sum4
        token += 4
    while token < num_tokens:
        first = keys[token * dim : (token + 1) * dim]
        for head in range(group):
            own = query[head * dim : (head + 1) * dim]
            sum1 = np.float32(0)
            for i in range(dim):
                sum1 += own[i] * first[i]
            scores[head * width + column + token] = sum1
        token += 1


@njit(**OPTIONS)
def _weigh(values, weights, sums, group, dim, size, width, column, num_tokens):
    """Add weight times value of `num_tokens` tokens of a block to `sums` `[group * size]`.

    A value is the first `size` of a token's `dim` numbers.
    """
    token = 0
    while token + 4 <= num_tokens:
        first = values[token * dim : token * dim + size]
        second = values[(token + 1) * dim : (token + 1) * dim + size]
        third = values[(token + 2) * dim : (token + 2) * dim + size]
        fourth = values[(token + 3) * dim : (token + 3) * dim + size]
        for head in range(group):
            place = head * width + column + token
            weight1, weight2 = weights[place], weights[place + 1]
            weight3, weight4 = weights[place + 2], weights[place + 3]
            own = sums[head * size : (head + 1) * size]
            for i in range(size):
                own[i] += (weight1 * first[i] + weight2 * second[i]) + (weight3 * third[i] + weight4 * fourth[i])
        token += 4
    while token < num_tokens:
        first = values[token * dim : token * dim + size]
        for head in range(group):
            weight1 = weights[head * width + column + token]
            own = sums[head * size : (head + 1) * size]
            for i in range(size):
                own[i] += weight1 * first[i]
        token += 1


@njit(**OPTIONS)
def _cap(scores, count, softcap):
    """Make `scores[:count]` softcap * tanh(score / softcap). tanh(x) is (1 - e ** -2x) / (1 + e ** -2x)."""
    for i in range(count):
        score = scores[i]
        power = exp(np.float32(-2) * abs(score) / softcap)
        capped = softcap * (np.float32(1) - power) / (np.float32(1) + power)
        scores[i] = -capped if score < np.float32(0) else capped


@njit(**OPTIONS)
def _weights(scores, count, softcap):
    """Make weights of `scores[:count]`: the softmax, of capped scores where `softcap` is not 0."""
    if softcap > np.float32(0):
        _cap(scores, count, softcap)
    largest = scores[0]
    for i in range(count):
        largest = scores[i] if scores[i] > largest else largest
    total = np.float32(0)
    for i in range(count):
        weight = exp(scores[i] - largest)
        scores[i] = weight
        total += weight
    inverse = np.float32(1) / total
    for i in range(count):
        scores[i] *= inverse


@njit(SIGNATURE, **OPTIONS)
def paged_decode(task, part, step):
    """Compute the parts `part`, `part + step`, .. of a task; see `task.Field`."""
    fields = carray(task, NUM_FIELDS)
    rows, groups, group, dim = fields[_ROWS], fields[_GROUPS], fields[_GROUP], fields[_HEAD_SIZE]
    block_size, slots, window, form = fields[_BLOCK_SIZE], fields[_SLOTS], fields[_WINDOW], fields[_FORMAT]
    width, parts, blocks = fields[_SCORES], fields[_PARTS], fields[_BLOCKS]
    key_heads, value_heads, size = fields[_KEY_HEADS], fields[_VALUE_HEADS], fields[_VALUE_SIZE]
    scale = np.float32(np.int64(fields[_SCALE]).view(np.float64))
    softcap = np.float32(np.int64(fields[_SOFTCAP]).view(np.float64))
    cuts = carray(int64s(fields[_CUTS]), parts + 1)
    starts, lengths = carray(int64s(fields[_STARTS]), rows), carray(int64s(fields[_LENGTHS]), rows)
    numbers, results = group * dim, group * size  # of a unit's query, and of its output
    queries = carray(float32s(fields[_QUERY]), rows * groups * numbers)
    outputs = carray(float32s(fields[_OUTPUT]), rows * groups * results)
    pool_heads = key_heads + value_heads
    pool_size = pool_heads * slots * dim
    pool, codes = carray(float32s(fields[_POOL]), pool_size), carray(bytes_at(fields[_POOL]), pool_size)
    halves = carray(uint16s(fields[_POOL]), pool_size)
    slot_scales = carray(uint16s(fields[_SCALES]), pool_heads * slots)
    head_scales = carray(float32s(fields[_SCALES]), pool_heads)
    scratch_size = group * (width + 2 * dim) + block_size * dim
    scratches = carray(float32s(fields[_SCRATCH]), parts * scratch_size)
    while part < parts:
        scratch = scratches[part * scratch_size : (part + 1) * scratch_size]
        scores, scaled = scratch[: group * width], scratch[group * width :][:numbers]
        sums, block = scratch[group * width + numbers :][:results], scratch[group * width + 2 * numbers :]
        for unit in range(cuts[part], cuts[part + 1]):
            own, row = unit // rows, unit % rows
            length = lengths[row]
            first = max(0, length - window) if window > 0 else 0
            table = carray(int32s(blocks + 4 * starts[row]), -(-length // block_size))
            place = row * groups + own
            for i in range(numbers):
                scaled[i] = queries[place * numbers + i] * scale
            for i in range(results):
                sums[i] = np.float32(0)
            for are_values in range(2):
                of_head = value_heads * are_values + own * key_heads // groups
                token = first
                while token < length:
                    inside = token % block_size
                    count = min(block_size - inside, length - token)
                    start = of_head * slots + np.int64(table[token // block_size]) * block_size + inside
                    if form != _FLOAT32:
                        to_float32(codes, halves, slot_scales, head_scales, form, of_head, start, dim, block, count)
                        run = block
                    else:
                        run = pool[start * dim : (start + count) * dim]
                    if are_values:
                        _weigh(run, scores, sums, group, dim, size, width, token - first, count)
                    else:
                        _score(scaled, run, scores, group, dim, width, token - first, count)
                    token += count
                if not are_values:
                    for member in range(group):
                        _weights(scores[member * width : (member + 1) * width], length - first, softcap)
            for i in range(results):
                outputs[place * results + i] = sums[i]
        part += step
