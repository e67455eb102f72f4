"""Sums of products of 8-bit numbers as LLVM instructions, for each kind of CPU that has them.

    weights    64 bytes [16 outputs][4 inputs]: codes from 0 to 255, or from -128 to 127
    row        4 signed bytes, the same for all outputs
    sums       16 int32; each gets the sum of its four products

`AVX512_VNNI` has one instruction for it. `AVX2` adds two neighbours in 16 bits, in which 255 * 127 * 2 does not fit:
codes of more than 7 bits are taken as signed ones there, their sign moved to the row, so that the largest sum is
128 * 127 * 2. Integers are exact, so both give the same sums, and a product the same bits.

Only the compiler imports this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from millstream_kernels.cpu.task import PANEL_OUTPUTS

WIDTH, INPUTS_AT_ONCE = PANEL_OUTPUTS, 4
SINGLE, INT8, INT16, INT32, INT64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
VECTOR, WHOLE = ir.VectorType(SINGLE, WIDTH), ir.VectorType(INT32, WIDTH)
BYTES = ir.VectorType(INT8, WIDTH * INPUTS_AT_ONCE)
_HALF_BYTES = ir.VectorType(INT8, 32)

Value = Any  # an instruction or a constant of llvmlite, which has no types


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: Value) -> Value:
    """Call one of LLVM's functions, which is an instruction of the CPU."""
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


class _Repeated(ir.Constant):  # type: ignore[misc]  # llvmlite has no types
    """A vector of one number, which is short as a text: there are thousands."""

    def _get_reference(self) -> str:
        (first, *_) = self.constant
        return f"splat ({first})"


def constant(kind: ir.Type, number: float) -> Value:
    """A number, or a vector of it."""
    return (_Repeated if isinstance(kind, ir.VectorType) else ir.Constant)(kind, number)


def splat(builder: ir.IRBuilder, number: Value, count: int = WIDTH) -> Value:
    """A vector of one number many times."""
    undefined = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    first = builder.insert_element(undefined, number, INT32(0))
    return builder.shuffle_vector(first, undefined, constant(ir.VectorType(INT32, count), 0))


def load(builder: ir.IRBuilder, address: Value, kind: ir.Type) -> Value:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store(builder: ir.IRBuilder, value: Value, address: Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


@dataclass(frozen=True, slots=True)
class Instructions:
    """What one kind of CPU computes sums with.

    Attributes:
        name: ends the names of its kernels.
        cpu: as LLVM names it.
        features: beyond those of `cpu`, as LLVM writes them.
        heights: rows of tiles, largest first: sums and a group's weights stay in registers.
        has_signed_codes: codes of 8 bits are made signed ones, and nothing is subtracted for their offset.
    """

    name: str
    cpu: str
    features: str
    heights: tuple[int, ...]
    has_signed_codes: bool

    def sums(self, builder: ir.IRBuilder, sums: Value, weights: Value, row: Value, *, is_signed: bool) -> Value:
        """`weights` BYTES, `row` four of its bytes as one int32."""
        if self.has_signed_codes:
            return _sums_of_avx2(builder, sums, weights, row, is_signed=is_signed)
        return call(
            builder, "llvm.x86.avx512.vpdpbusd.512", WHOLE, sums, weights, _as_bytes(builder, splat(builder, row))
        )


def _as_bytes(builder: ir.IRBuilder, whole: Value) -> Value:
    return builder.bitcast(whole, BYTES)


def _sums_of_avx2(builder: ir.IRBuilder, sums: Value, weights: Value, row: Value, *, is_signed: bool) -> Value:
    numbers = builder.bitcast(splat(builder, row, 8), _HALF_BYTES)
    halves = []
    for half in range(2):
        places = ir.Constant(_HALF_BYTES_INDEX, [*range(32 * half, 32 * half + 32)])
        own = builder.shuffle_vector(weights, ir.Constant(BYTES, ir.Undefined), places)
        signed = numbers
        if is_signed:
            signed = call(builder, "llvm.x86.avx2.psign.b", _HALF_BYTES, numbers, own)
            own = call(builder, "llvm.abs.v32i8", _HALF_BYTES, own, ir.Constant(ir.IntType(1), 0))
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(INT16, 16), own, signed)
        ones = constant(ir.VectorType(INT16, 16), 1)
        halves.append(call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(INT32, 8), pairs, ones))
    both = builder.shuffle_vector(*halves, ir.Constant(WHOLE, [*range(WIDTH)]))
    return builder.add(sums, both)


_HALF_BYTES_INDEX = ir.VectorType(INT32, 32)
AVX512_VNNI = Instructions("avx512_vnni", "x86-64-v4", "+avx512vnni", (8, 4, 2, 1), has_signed_codes=False)
AVX2 = Instructions("avx2", "x86-64-v3", "", (2, 1), has_signed_codes=True)
