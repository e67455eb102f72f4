"""Keys and values as they are stored, made float32, one loop of vectors per format; and numbers of 16 bits made.

Only the compiler imports this (`hack.kernels.prebuild_cpu`).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from millstream_kernels.cpu.intrinsics import OPTIONS, half, single, single_bits
from millstream_kernels.cpu.task import Format

FP8_SHIFT, FLOAT16_SHIFT = np.float32(2.0**120), np.float32(2.0**112)
_INT8, _FP8, _BFLOAT16 = Format.INT8.value, Format.FP8.value, Format.BFLOAT16.value


@njit(**OPTIONS)
def to_float32(codes, halves, scales, head_scales, form, head, start, dim, block, count):
    """Make `count` neighbouring slots of a head float32 in `block` `[count * dim]`. `start`: the first slot, of all.

    A bfloat16 is the upper half of a float32. An e4m3 code shifted to the places of a float32's fields is its number /
    2 ** 120, a float16 its number / 2 ** 112, also where they are subnormal. Each form is a loop of vectors.
    """
    numbers = halves[start * dim : (start + count) * dim]
    if form == _BFLOAT16:
        for i in range(count * dim):
            block[i] = single(np.uint32(numbers[i]) << np.uint32(16))
    elif form == _INT8:
        for token in range(count):
            scale = half(scales[start + token])
            own = codes[(start + token) * dim : (start + token + 1) * dim]
            into = block[token * dim : (token + 1) * dim]
            for i in range(dim):
                into[i] = np.float32(np.int8(own[i])) * scale
    elif form == _FP8:
        scale = head_scales[head]
        own = codes[start * dim : (start + count) * dim]
        for i in range(count * dim):
            size = np.uint32(own[i] & np.uint8(0x7F))
            sign = np.uint32(own[i] & np.uint8(0x80)) << np.uint32(24)
            number = single((size << np.uint32(20)) | sign) * FP8_SHIFT
            block[i] = (np.float32(np.nan) if size == np.uint32(0x7F) else number) * scale
    else:
        for i in range(count * dim):
            size = np.uint32(numbers[i] & np.uint16(0x7FFF))
            sign = np.uint32(numbers[i] & np.uint16(0x8000)) << np.uint32(16)
            bits = (size << np.uint32(13)) | sign
            if size >= np.uint32(0x7C00):  # infinity or NaN
                block[i] = single(bits | np.uint32(0x7F800000))
            else:
                block[i] = single(bits) * FLOAT16_SHIFT


@njit(**OPTIONS)
def to_bfloat16(number):
    """The bits of the bfloat16 that a float32 is rounded to, half to even. NaN stays NaN."""
    bits = single_bits(number)
    if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
