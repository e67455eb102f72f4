"""What the kernels for a CPU share: how numba compiles them, addresses as arrays of numbers, a root, an exponential.

Only the compiler imports this (`hack.kernels.prebuild_cpu`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Sums may be reordered, for they are vectors; NaN and infinities keep their meaning, for a caller looks for them.
REORDERED = {"reassoc", "contract", "arcp", "nsz"}
OPTIONS: dict[str, Any] = {"fastmath": REORDERED, "error_model": "numpy", "boundscheck": False}
SIGNATURE = types.void(types.CPointer(types.int64), types.int64, types.int64)

LOG2_E = np.float32(1.4426950408889634)
LEAST_EXPONENT = np.float32(-126.0)  # 2 ** -126 is the smallest normal float32; a weight below it is as good as none
# 2 ** x for -0.5 <= x <= 0.5, from Cephes (S. Moshier): relative error 2e-7.
EXP2 = tuple(
    np.float32(one)
    for one in (
        1.535336188319500e-4,
        1.339887440266574e-3,
        9.618437357674640e-3,
        5.550332471162809e-2,
        2.402264791363012e-1,
        6.931472028550421e-1,
        1.0,
    )
)


def _pointer_to(kind: Any) -> Any:
    """An intrinsic that takes an address for a pointer to numbers of that kind."""

    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(address), code

    return pointer


float32s, int32s, int64s = _pointer_to(types.float32), _pointer_to(types.int32), _pointer_to(types.int64)
bytes_at, uint16s = _pointer_to(types.uint8), _pointer_to(types.uint16)


def _float32_of_bits(*, is_half: bool) -> Any:
    """An intrinsic: the float32 whose bits these are, or that of a float16's bits."""

    @intrinsic
    def number(typing_context: Any, bits: Any) -> Any:
        def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            if is_half:
                return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())
            return builder.bitcast(arguments[0], ir.FloatType())

        return types.float32(types.uint16 if is_half else types.uint32), code

    return number


half, single = _float32_of_bits(is_half=True), _float32_of_bits(is_half=False)


def _bits_of_float32(*, is_half: bool) -> Any:
    """An intrinsic: the bits of a float32, or of the float16 that it is rounded to, half to even."""

    @intrinsic
    def bits(typing_context: Any, number: Any) -> Any:
        def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            if is_half:
                return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))
            return builder.bitcast(arguments[0], ir.IntType(32))

        return types.uint16(types.float32) if is_half else types.uint32(types.float32), code

    return bits


to_half, single_bits = _bits_of_float32(is_half=True), _bits_of_float32(is_half=False)


@intrinsic
def root(typing_context: Any, number: Any) -> Any:
    """The square root of a float32 as an instruction; numpy's would be a call of the C library."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        single = ir.FloatType()
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(single, [single]), "llvm.sqrt.f32")
        return builder.call(function, arguments)

    return types.float32(types.float32), code


@njit(**OPTIONS)
def exp(x):
    """e ** x of a float32 that is not above 0."""
    exponent = x * LOG2_E
    exponent = LEAST_EXPONENT if exponent < LEAST_EXPONENT else exponent  # NaN stays NaN, which max() would lose
    whole = np.floor(exponent + np.float32(0.5))
    rest = exponent - whole
    power = EXP2[0]
    power = power * rest + EXP2[1]
    power = power * rest + EXP2[2]
    power = power * rest + EXP2[3]
    power = power * rest + EXP2[4]
    power = power * rest + EXP2[5]
    power = power * rest + EXP2[6]
    return power * single(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))
