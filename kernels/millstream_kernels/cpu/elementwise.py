"""What a layer computes around its products and its attention on a CPU, in float32: each in one pass over memory.

    rms_norm            x / sqrt(mean(x ** 2) + eps) * weight
    gated_activation    activation(gate) * up: SiLU, or GELU by tanh
    rope_kv_write       queries and keys normed where the model norms them, and rotated; keys and values stored

torch takes three to eight operations for each, of 2 to 5 us however few the rows. Work is a few operations per number;
bytes are those of inputs and results, each once. The rows are divided among the threads of a team, and a row's result
depends neither on the others nor on the number of threads.

This is Python that numba compiles (`hack.kernels.prebuild_cpu`): nothing else imports it. It allocates nothing and
raises nothing. RMS norm: Zhang and Sennrich 2019 (arXiv 1910.07467); rotation: Su et al. 2021 (arXiv 2104.09864).
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from millstream_kernels.cpu.intrinsics import OPTIONS, SIGNATURE, exp, float32s, int64s, root, to_half, uint16s
from millstream_kernels.cpu.stored_numbers import to_bfloat16
from millstream_kernels.cpu.task import ActivationKind, Format, GateField, NormField, RopeField

# Plain integers: numba takes globals for constants, but no members of an enumeration.
_X, _WEIGHT, _OUT, _ROWS, _SIZE, _EPS = (field.value for field in NormField)
_GATE_X, _GATE_OUT, _GATE_ROWS, _GATE_SIZE, _KIND = (field.value for field in GateField)
_QKV, _QUERY, _POOL, _COS, _SIN, _POSITIONS, _SLOTS, _HEAD_WEIGHT = (field.value for field in list(RopeField)[:8])
_TOKENS, _HEADS, _KV_HEADS, _HEAD_SIZE, _PAIRS, _POOL_SLOTS = (field.value for field in list(RopeField)[8:14])
_NUM_ANGLES, _HEAD_EPS, _FORMAT = (field.value for field in list(RopeField)[14:])
_SILU, _FLOAT32, _BFLOAT16 = ActivationKind.SILU.value, Format.FLOAT32.value, Format.BFLOAT16.value
_NORM_FIELDS, _GATE_FIELDS, _ROPE_FIELDS = len(NormField), len(GateField), len(RopeField)

# tanh(x) = 2 * sigmoid(2 * x) - 1, so GELU by tanh is x * sigmoid(GELU_SCALE * (x + GELU_CUBE * x ** 3)).
GELU_CUBE, GELU_SCALE = np.float32(0.044715), np.float32(1.5957691216057308)


@njit(**OPTIONS)
def _inverse_length(row, size, eps):
    """1 / sqrt(mean(row ** 2) + eps)."""
    total = np.float32(0)
    for i in range(size):
        total += row[i] * row[i]
    return np.float32(1) / root(total / np.float32(size) + eps)


@njit(SIGNATURE, **OPTIONS)
def rms_norm(task, part, step):
    """Compute the share `part` of `step` of a task; see `task.NormField`."""
    fields = carray(task, _NORM_FIELDS)
    rows, size = fields[_ROWS], fields[_SIZE]
    eps = np.float32(np.int64(fields[_EPS]).view(np.float64))
    x, out = carray(float32s(fields[_X]), rows * size), carray(float32s(fields[_OUT]), rows * size)
    weight = carray(float32s(fields[_WEIGHT]), size)
    for row in range(rows * part // step, rows * (part + 1) // step):
        own, into = x[row * size : (row + 1) * size], out[row * size : (row + 1) * size]
        scale = _inverse_length(own, size, eps)
        for i in range(size):
            into[i] = own[i] * scale * weight[i]


@njit(SIGNATURE, **OPTIONS)
def gated_activation(task, part, step):
    """The same; see `task.GateField`. Both activations are x * sigmoid(y), and e ** -|y| does not overflow."""
    fields = carray(task, _GATE_FIELDS)
    rows, size, kind = fields[_GATE_ROWS], fields[_GATE_SIZE], fields[_KIND]
    x, out = carray(float32s(fields[_GATE_X]), 2 * rows * size), carray(float32s(fields[_GATE_OUT]), rows * size)
    for row in range(rows * part // step, rows * (part + 1) // step):
        gates, ups = x[2 * row * size : (2 * row + 1) * size], x[(2 * row + 1) * size : (2 * row + 2) * size]
        into = out[row * size : (row + 1) * size]
        if kind == _SILU:
            for i in range(size):
                number = gates[i]
                power = exp(-abs(number))
                above = np.float32(1) if number >= np.float32(0) else power
                into[i] = number * (above / (np.float32(1) + power)) * ups[i]
        else:
            for i in range(size):
                number = gates[i]
                inner = GELU_SCALE * (number + GELU_CUBE * number * number * number)
                power = exp(-abs(inner))
                above = np.float32(1) if inner >= np.float32(0) else power
                into[i] = number * (above / (np.float32(1) + power)) * ups[i]


@njit(**OPTIONS)
def _as_it_is(number):
    return number


@njit(**OPTIONS)
def _to_float16(number):
    return to_half(number)


def _head_written_as(stored):
    """What writes a head as numbers of one format. `stored`: makes one of a float32."""

    @njit(**OPTIONS)
    def rotate(own, into, cos, sin, pairs, size):
        """Turn the first `2 * pairs` numbers of a head: number i with number `pairs + i`."""
        for i in range(pairs):
            first, second = own[i], own[i + pairs]
            into[i] = stored(first * cos[i] - second * sin[i])
            into[i + pairs] = stored(second * cos[i] + first * sin[i])
        for i in range(2 * pairs, size):
            into[i] = stored(own[i])

    @njit(**OPTIONS)
    def norm_and_rotate(own, into, weight, scale, cos, sin, pairs, size):
        """The same of `own * scale * weight`."""
        for i in range(pairs):
            first, second = own[i] * scale * weight[i], own[i + pairs] * scale * weight[i + pairs]
            into[i] = stored(first * cos[i] - second * sin[i])
            into[i + pairs] = stored(second * cos[i] + first * sin[i])
        for i in range(2 * pairs, size):
            into[i] = stored(own[i] * scale * weight[i])

    @njit(**OPTIONS)
    def write(own, into, weights, eps, cos, sin, head, turned_heads, is_normed, pairs, size):
        """One head: of a query or a key, or, from `turned_heads` on, of a value."""
        if head >= turned_heads:
            for i in range(size):
                into[i] = stored(own[i])
        elif is_normed:
            weight, scale = weights[head * size : (head + 1) * size], _inverse_length(own, size, eps)
            norm_and_rotate(own, into, weight, scale, cos, sin, pairs, size)
        else:
            rotate(own, into, cos, sin, pairs, size)

    return write


_write_float32, _write_bfloat16 = _head_written_as(_as_it_is), _head_written_as(to_bfloat16)
_write_float16 = _head_written_as(_to_float16)


@njit(SIGNATURE, **OPTIONS)
def rope_kv_write(task, part, step):
    """The same; see `task.RopeField`. Of a token whose slot or position does not exist nothing is stored, and its
    queries are NaN."""
    fields = carray(task, _ROPE_FIELDS)
    tokens, heads, kv_heads, size = fields[_TOKENS], fields[_HEADS], fields[_KV_HEADS], fields[_HEAD_SIZE]
    pairs, pool_slots, num_angles = fields[_PAIRS], fields[_POOL_SLOTS], fields[_NUM_ANGLES]
    eps, is_normed = np.float32(np.int64(fields[_HEAD_EPS]).view(np.float64)), fields[_HEAD_WEIGHT] != 0
    all_heads = heads + 2 * kv_heads
    qkv = carray(float32s(fields[_QKV]), tokens * all_heads * size)
    queries = carray(float32s(fields[_QUERY]), tokens * heads * size)
    pool, form = carray(float32s(fields[_POOL]), 2 * kv_heads * pool_slots * size), fields[_FORMAT]
    narrow_pool = carray(uint16s(fields[_POOL]), 2 * kv_heads * pool_slots * size)
    cosines = carray(float32s(fields[_COS]), num_angles * pairs)
    sines = carray(float32s(fields[_SIN]), num_angles * pairs)
    weights = carray(float32s(fields[_HEAD_WEIGHT]), (heads + kv_heads) * size)
    positions, slots = carray(int64s(fields[_POSITIONS]), tokens), carray(int64s(fields[_SLOTS]), tokens)
    for token in range(tokens * part // step, tokens * (part + 1) // step):
        position, slot = positions[token], slots[token]
        if position < 0 or position >= num_angles or slot < 0 or slot >= pool_slots:
            queries[token * heads * size : (token + 1) * heads * size] = np.float32(np.nan)
            continue
        cos = cosines[position * pairs : (position + 1) * pairs]
        sin = sines[position * pairs : (position + 1) * pairs]
        for head in range(all_heads):
            place = (token * all_heads + head) * size
            own = qkv[place : place + size]
            turned, pool_place = heads + kv_heads, ((head - heads) * pool_slots + slot) * size
            if head < heads:
                place = (token * heads + head) * size
                into = queries[place : place + size]
                _write_float32(own, into, weights, eps, cos, sin, head, turned, is_normed, pairs, size)
            elif form == _FLOAT32:
                into = pool[pool_place : pool_place + size]
                _write_float32(own, into, weights, eps, cos, sin, head, turned, is_normed, pairs, size)
            elif form == _BFLOAT16:
                halves = narrow_pool[pool_place : pool_place + size]
                _write_bfloat16(own, halves, weights, eps, cos, sin, head, turned, is_normed, pairs, size)
            else:
                halves = narrow_pool[pool_place : pool_place + size]
                _write_float16(own, halves, weights, eps, cos, sin, head, turned, is_normed, pairs, size)
