"""Codes and scales of a group as vectors, for `integer_product`: what lies where is in `layouts`.

Only the compiler imports this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from millstream_kernels.cpu.integer.layouts import ScaleLayout
from millstream_kernels.cpu.integer.vectors import (
    BYTES,
    INT8,
    INT16,
    VECTOR,
    WHOLE,
    WIDTH,
    Value,
    constant,
    load,
)
from millstream_kernels.cpu.vectors import plus

_HALVES = ir.VectorType(ir.HalfType(), WIDTH)
_VECTOR_BYTES = 64


def from_halves(builder: ir.IRBuilder, address: Value) -> Value:
    return builder.fpext(load(builder, address, _HALVES), VECTOR)


def scales_of(
    builder: ir.IRBuilder, kind: ScaleLayout, shared: Sequence[Value], small: Value
) -> tuple[list[Value], Value | None]:
    """Scales of the parts of a group, and its least weights."""
    if not kind.group_bytes:
        return [shared[0]], shared[1] if len(shared) > 1 else None

    def whole(at: int) -> Value:
        stored = load(builder, plus(builder, small, WIDTH * at), ir.VectorType(INT8, WIDTH))
        widened = builder.sext(stored, WHOLE) if kind.is_signed else builder.zext(stored, WHOLE)
        return builder.sitofp(widened, VECTOR)

    if kind.has_least:
        return [builder.fmul(shared[0], whole(0))], builder.fmul(shared[1], whole(1))
    return [builder.fmul(shared[0], whole(at)) for at in range(kind.group_bytes // WIDTH)], None


def _stored(builder: ir.IRBuilder, codes: Value, first: int, count: int) -> list[Value]:
    return [load(builder, plus(builder, codes, _VECTOR_BYTES * (first + at)), BYTES) for at in range(count)]


def _shifted(builder: ir.IRBuilder, vector: Value, shift: int, mask: int) -> Value:
    """Bits of each byte moved down (`shift` above 0) or up, and masked: vectors of bytes have no shifts."""
    shorts = ir.VectorType(INT16, 32)
    whole = builder.bitcast(vector, shorts)
    if shift:
        move = builder.lshr if shift > 0 else builder.shl
        whole = move(whole, constant(shorts, abs(shift)))
    return builder.and_(builder.bitcast(whole, BYTES), constant(BYTES, mask))


def _of_four_bits(builder: ir.IRBuilder, codes: Value) -> list[Value]:
    stored = _stored(builder, codes, 0, 4)
    return [_shifted(builder, one, 0, 15) for one in stored] + [_shifted(builder, one, 4, 15) for one in stored]


def _of_five_bits(builder: ir.IRBuilder, codes: Value) -> list[Value]:
    """Bit `i` of a byte of the last vector is the fifth bit in vector `i`."""
    (high,) = _stored(builder, codes, 4, 1)
    low = _of_four_bits(builder, codes)
    return [builder.or_(one, _shifted(builder, high, at - 4, 16)) for at, one in enumerate(low)]


def _of_six_bits(builder: ir.IRBuilder, codes: Value) -> list[Value]:
    """Two bits of each byte of the last two vectors, one for vectors 0 to 3 and one for 4 to 7."""
    high = _stored(builder, codes, 4, 2)
    low = _of_four_bits(builder, codes)
    return [builder.or_(one, _shifted(builder, high[at // 4], 2 * (at % 4) - 4, 48)) for at, one in enumerate(low)]


def _of_eight_bits(builder: ir.IRBuilder, codes: Value) -> list[Value]:
    return _stored(builder, codes, 0, 8)


WIDENED: dict[int, Callable[[ir.IRBuilder, Value], list[Value]]] = {
    4: _of_four_bits,
    5: _of_five_bits,
    6: _of_six_bits,
    8: _of_eight_bits,
}
