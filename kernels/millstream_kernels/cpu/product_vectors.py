"""Tiles of a product by a 16-bit weight as LLVM instructions: vectors of 16 outputs, one per row and panel.

    panel    [inputs][16 outputs] of 16 bits: one input's weights are one vector, widened to float32 as it is read
    tile     1 to 6 rows by 1 to 4 panels: sums stay in registers over a block of inputs, and take them in their order

So the result of a row depends neither on the rows next to it nor on the tile that it is computed in.

All arguments are int64; addresses are of float32 unless said. Only the compiler imports this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from millstream_kernels.cpu.task import PANEL_OUTPUTS
from millstream_kernels.cpu.vectors import Value, intrinsic_of, load, plus, repeat, store, times

WIDTH = PANEL_OUTPUTS
BLOCK_INPUTS = 256  # whose products are added up in registers: a sum of few rounds less than one of thousands
_SINGLE, _INT16, _INT32, _INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR, _SHORTS, _WHOLE = ir.VectorType(_SINGLE, WIDTH), ir.VectorType(_INT16, WIDTH), ir.VectorType(_INT32, WIDTH)
_HALVES = ir.VectorType(ir.HalfType(), WIDTH)
_INPUT_BYTES, _OUTPUTS_BYTES = 2 * WIDTH, 4 * WIDTH


def _of_bfloat16(builder: ir.IRBuilder, address: Value) -> Value:
    """Sixteen weights as float32: a bfloat16 is the upper half of one."""
    whole = builder.zext(load(builder, address, _SHORTS), _WHOLE)
    return builder.bitcast(builder.shl(whole, ir.Constant(_WHOLE, [16] * WIDTH)), _VECTOR)


def _of_float16(builder: ir.IRBuilder, address: Value) -> Value:
    return builder.fpext(load(builder, address, _HALVES), _VECTOR)


def _fma(builder: ir.IRBuilder, *arguments: Value) -> Value:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), arguments)


def _splat(builder: ir.IRBuilder, number: Value) -> Value:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, _INT32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_WHOLE, [0] * WIDTH))


def _tile(rows: int, panels: int, widened: Callable[[ir.IRBuilder, Value], Value]) -> Callable[..., None]:
    """A tile of `rows` by `panels`.

    `x`: the first row; `row_bytes`: from one to the next; `weights`: of 16 bits, the first panel, the others follow;
    `inputs`: of a row; `out`, `out_bytes`: as `x` and `row_bytes`.
    """

    def tile(
        builder: ir.IRBuilder, x: Value, row_bytes: Value, weights: Value, inputs: Value, out: Value, out_bytes: Value
    ) -> None:
        panel_bytes = times(builder, inputs, _INPUT_BYTES)
        row_starts = _steps(builder, x, row_bytes, rows)
        panel_starts = _steps(builder, weights, panel_bytes, panels)

        places = [
            plus(builder, start, panel * _OUTPUTS_BYTES)
            for start in _steps(builder, out, out_bytes, rows)
            for panel in range(panels)
        ]
        zeros = [ir.Constant(_VECTOR, [ir.Constant(_SINGLE, 0.0)] * WIDTH)] * len(places)
        for zero, place in zip(zeros, places, strict=True):
            store(builder, zero, place)

        def add_block(block: Value, kept: Sequence[Value]) -> Sequence[Value]:
            start = times(builder, block, BLOCK_INPUTS)
            left = builder.sub(inputs, start)
            is_whole = builder.icmp_signed(">", left, _INT64(BLOCK_INPUTS))
            count = builder.select(is_whole, _INT64(BLOCK_INPUTS), left)
            first_bytes = times(builder, start, _INPUT_BYTES), times(builder, start, 4)

            def body(index: Value, sums: Sequence[Value]) -> Sequence[Value]:
                offset = builder.add(first_bytes[0], times(builder, index, _INPUT_BYTES))
                input_offset = builder.add(first_bytes[1], times(builder, index, 4))
                vectors = [widened(builder, builder.add(start, offset)) for start in panel_starts]
                added = []
                for row, start in enumerate(row_starts):
                    number = _splat(builder, load(builder, builder.add(start, input_offset), _SINGLE))
                    own = sums[row * panels : (row + 1) * panels]
                    added += [_fma(builder, vector, number, total) for vector, total in zip(vectors, own, strict=True)]
                return added

            for total, place in zip(repeat(builder, count, zeros, body), places, strict=True):
                store(builder, builder.fadd(load(builder, place, _VECTOR), total), place)
            return kept

        blocks = builder.sdiv(plus(builder, inputs, BLOCK_INPUTS - 1), _INT64(BLOCK_INPUTS))
        repeat(builder, blocks, [], add_block)

    return tile


def _steps(builder: ir.IRBuilder, start: Value, step: Value, count: int) -> list[Value]:
    """`start`, `start + step`, and so on."""
    found = [start]
    for _ in range(count - 1):
        found.append(builder.add(found[-1], step))
    return found


def _tiles(widened: Callable[[ir.IRBuilder, Value], Value]) -> list[Any]:
    return [intrinsic_of(_tile(rows, panels, widened), 6) for rows, panels in TILES]


# Rows by panels. Twelve vectors of eight sums and what they are made of fill the registers of AVX2; for one row several
# panels give as many sums that do not wait for one another.
TILES = ((6, 1), (4, 1), (2, 2), (2, 1), (1, 4), (1, 1))
TILES_OF = {"bfloat16": _tiles(_of_bfloat16), "float16": _tiles(_of_float16)}  # by how weights are stored
