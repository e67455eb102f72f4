"""Rows that are rounded to 8 bits times a weight in codes of 4 to 8 bits: integer sums per group, float32 beyond.

    step[t, g]   = largest |x[t, k]| of the 32 inputs k of g / 127
    q[t, k]      = round(x[t, k] / step[t, g])                              half to even, -127 to 127
    out[t, n]    = sum over g of  step[t, g] * scale[g, n] * (sum over k of  q[t, k] * (code[k, n] - offset))
                                - step[t, g] * least[g, n] * (sum over k of  q[t, k])       where the format has a least

What lies where is in `layouts`. A tile is 1 to 8 rows by one panel of 16 outputs. Codes are widened to 8 bits
in registers, once for all rows of a tile: with few rows the time is that of reading the codes, with many that of the
sums. Groups are added in their order, each by the same instructions in a tile of any height, so the result of a row
depends neither on the other rows nor on the number of threads, bit for bit.

This writes LLVM's language itself: numba compiles for one kind of CPU in a process, and each function here is for its
own. Only the compiler imports it.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from millstream_kernels.cpu.integer.codes import WIDENED, from_halves, scales_of
from millstream_kernels.cpu.integer.layouts import (
    FORMATS,
    GROUP_INPUTS,
    LEAST_PLACE,
    MOST_TILE_ROWS,
    OFFSETS_PLACE,
    RECORD_BYTES,
    STEP_PLACE,
    CodeFormat,
)
from millstream_kernels.cpu.integer.vectors import (
    AVX2,
    AVX512_VNNI,
    BYTES,
    INT8,
    INT32,
    INT64,
    SINGLE,
    VECTOR,
    WHOLE,
    WIDTH,
    Instructions,
    Value,
    call,
    constant,
    load,
    splat,
    store,
)
from millstream_kernels.cpu.task import IntegerProductField, IntegerRowsField
from millstream_kernels.cpu.vectors import plus, repeat, times

_EIGHT, _EIGHT_WHOLE = ir.VectorType(SINGLE, 8), ir.VectorType(INT32, 8)
_VECTORS_OF_GROUP = 8
_LEVELS = 127.0
_INFINITY_BITS, _SIZE_BITS = 0x7F800000, 0x7FFFFFFF
_LEAST_SIZE_BITS = 0x04000000  # 2 ** -119: below it 127 / size overflows, and a group is as good as zeros
_NAN = float("nan")


def module_text() -> str:
    """The functions of all kinds of CPU, as numba's: `(result, error, task, part, step)`."""
    module = ir.Module("integers")
    for instructions in (AVX512_VNNI, AVX2):
        prepare = _rows_function(module, instructions)
        _kernel_of_rows(module, instructions, prepare)
        _kernel_of_product(module, instructions, prepare)
    return str(module)


def _function(module: ir.Module, name: str, num_arguments: int, instructions: Instructions) -> ir.Function:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT64] * num_arguments), f"integers.{name}")
    function.linkage = "internal"
    _attribute(function, instructions)
    return function


def _kernel(module: ir.Module, name: str, instructions: Instructions) -> tuple[ir.IRBuilder, Value, Value, Value]:
    """A function as numba's: its builder, and task (an address), part and step."""
    pointer = INT8.as_pointer()
    kind = ir.FunctionType(INT32, [pointer, pointer, pointer, INT64, INT64])
    function = ir.Function(module, kind, f"{name}_{instructions.name}")
    _attribute(function, instructions)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    task, part, step = function.args[2:]
    return builder, builder.ptrtoint(task, INT64), part, step


def _attribute(function: ir.Function, instructions: Instructions) -> None:
    texts = [f'"target-cpu"="{instructions.cpu}"', '"prefer-vector-width"="512"', '"min-legal-vector-width"="512"']
    if instructions.features:
        texts.append(f'"target-features"="{instructions.features}"')
    for text in ("nounwind", *texts):
        set.add(function.attributes, text)  # llvmlite's own method knows no attributes of a target


def _field(builder: ir.IRBuilder, task: Value, field: int) -> Value:
    return builder.load(builder.inttoptr(plus(builder, task, 8 * int(field)), INT64.as_pointer()), align=8)


def _share(builder: ir.IRBuilder, count: Value, part: Value, step: Value) -> tuple[Value, Value]:
    """First and end of what a thread computes."""
    first = builder.sdiv(builder.mul(count, part), step)
    return first, builder.sdiv(builder.mul(count, plus(builder, part, 1)), step)


# Rows.


def _rows_function(module: ir.Module, instructions: Instructions) -> ir.Function:
    """`(x, prepared, inputs, rows, first, end, offset)`: prepare rows `first` to `end` of all."""
    function = _function(module, f"prepare_{instructions.name}", 7, instructions)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x, prepared, inputs, rows, first, end, offset = function.args
    groups = builder.sdiv(inputs, INT64(GROUP_INPUTS))
    negative = builder.trunc(builder.neg(offset), INT32)

    def of_row(index: Value, kept: Sequence[Value]) -> Sequence[Value]:
        row = builder.add(first, index)
        source = builder.add(x, times(builder, builder.mul(row, inputs), 4))
        tile_start = times(builder, builder.sdiv(row, INT64(MOST_TILE_ROWS)), MOST_TILE_ROWS)
        height = _least(builder, INT64(MOST_TILE_ROWS), builder.sub(rows, tile_start))
        start = times(builder, builder.mul(tile_start, groups), RECORD_BYTES)
        start = builder.add(start, times(builder, builder.sub(row, tile_start), RECORD_BYTES))
        start = builder.add(prepared, start)
        stride = times(builder, height, RECORD_BYTES)

        def of_group(group: Value, kept: Sequence[Value]) -> Sequence[Value]:
            numbers = builder.add(source, times(builder, group, 4 * GROUP_INPUTS))
            _prepare_group(builder, numbers, builder.add(start, builder.mul(group, stride)), negative)
            return kept

        repeat(builder, groups, [], of_group)
        return kept

    repeat(builder, builder.sub(end, first), [], of_row)
    builder.ret_void()
    return function


def _least(builder: ir.IRBuilder, one: Value, other: Value) -> Value:
    return builder.select(builder.icmp_signed("<", one, other), one, other)


def _prepare_group(builder: ir.IRBuilder, numbers: Value, record: Value, negative: Value) -> None:
    """`negative`: int32, what each sum of codes is multiplied by."""
    vectors = [load(builder, plus(builder, numbers, 32 * part), _EIGHT) for part in range(4)]
    sizes = [builder.and_(builder.bitcast(one, _EIGHT_WHOLE), constant(_EIGHT_WHOLE, _SIZE_BITS)) for one in vectors]
    while len(sizes) > 1:
        sizes = [call(builder, "llvm.umax.v8i32", _EIGHT_WHOLE, *sizes[at : at + 2]) for at in range(0, len(sizes), 2)]
    size_bits = call(builder, "llvm.vector.reduce.umax.v8i32", INT32, sizes[0])
    size = builder.bitcast(size_bits, SINGLE)
    is_finite = builder.icmp_unsigned("<", size_bits, INT32(_INFINITY_BITS))
    has_size = builder.icmp_unsigned(">=", size_bits, INT32(_LEAST_SIZE_BITS))
    is_regular = builder.and_(is_finite, has_size)
    zero = constant(SINGLE, 0.0)
    factor = builder.select(is_regular, builder.fdiv(constant(SINGLE, _LEVELS), size), zero)
    step = builder.select(is_regular, builder.fdiv(size, constant(SINGLE, _LEVELS)), zero)
    step = builder.select(is_finite, step, constant(SINGLE, _NAN))  # a row with a NaN or an infinity is NaN
    codes = [_rounded(builder, builder.fmul(one, splat(builder, factor, 8))) for one in vectors]
    for part, whole in enumerate(codes):
        store(builder, builder.trunc(whole, ir.VectorType(INT8, 8)), plus(builder, record, 8 * part))
    low, high = (
        call(builder, "llvm.vector.reduce.add.v8i32", INT32, builder.add(*codes[at : at + 2])) for at in (0, 2)
    )
    total = builder.add(low, high)
    least = builder.fneg(builder.fmul(step, builder.sitofp(total, SINGLE)))
    store(builder, step, plus(builder, record, STEP_PLACE))
    store(builder, least, plus(builder, record, LEAST_PLACE))
    for at, sum_of_codes in enumerate((low, high, total)):
        store(builder, builder.mul(sum_of_codes, negative), plus(builder, record, OFFSETS_PLACE + 4 * at))


def _rounded(builder: ir.IRBuilder, numbers: Value) -> Value:
    """To whole numbers, half to even; what is NaN becomes any number."""
    return call(builder, "llvm.x86.avx.cvt.ps2dq.256", _EIGHT_WHOLE, numbers)


def _kernel_of_rows(module: ir.Module, instructions: Instructions, prepare: ir.Function) -> None:
    builder, task, part, step = _kernel(module, "integer_rows", instructions)
    x, prepared, rows, inputs, offset = (_field(builder, task, field) for field in IntegerRowsField)
    first, end = _share(builder, rows, part, step)
    builder.call(prepare, [x, prepared, inputs, rows, first, end, offset])
    builder.ret(INT32(0))


# Products.


def _kernel_of_product(module: ir.Module, instructions: Instructions, prepare: ir.Function) -> None:
    builder, task, part, step = _kernel(module, "integer_product", instructions)
    fields = {field: _field(builder, task, field) for field in IntegerProductField}
    panels, rows, inputs = (fields[IntegerProductField[name]] for name in ("NUM_PANELS", "ROWS", "INPUTS"))
    own = builder.mul(part, fields[IntegerProductField.SCRATCH_BYTES])
    prepared = builder.add(fields[IntegerProductField.PREPARED], own)
    first, end = _share(builder, panels, part, step)
    x = fields[IntegerProductField.X]
    with builder.if_then(builder.icmp_unsigned("!=", x, INT64(0))):
        offset = fields[IntegerProductField.OFFSET]
        builder.call(prepare, [x, prepared, inputs, rows, INT64(0), rows, offset])
    done = builder.append_basic_block("done")
    choice = builder.switch(fields[IntegerProductField.FORMAT], done)
    for code_format in FORMATS.values():
        function = _product_function(module, instructions, code_format)
        block = builder.append_basic_block(code_format.name)
        choice.add_case(INT64(code_format.number), block)
        builder.position_at_end(block)
        codes, scales, out = (fields[IntegerProductField[name]] for name in ("CODES", "SCALES", "OUT"))
        builder.call(function, [prepared, codes, scales, out, rows, inputs, panels, first, end])
        builder.branch(done)
    builder.position_at_end(done)
    builder.ret(INT32(0))


def _product_function(module: ir.Module, instructions: Instructions, code_format: CodeFormat) -> ir.Function:
    """`(prepared, codes, scales, out, rows, inputs, panels, first, end)`."""
    heights = instructions.heights
    tiles = {height: _tile_function(module, instructions, code_format, height) for height in heights}
    function = _function(module, f"product_{code_format.name}_{instructions.name}", 9, instructions)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    prepared, codes, scales, out, rows, inputs, panels, first, end = function.args
    groups = builder.sdiv(inputs, INT64(GROUP_INPUTS))
    units = builder.sdiv(inputs, INT64(code_format.scales.inputs))
    codes_of_panel = times(builder, groups, code_format.group_bytes)
    scales_of_panel = times(builder, units, code_format.scales.num_bytes)
    out_stride = times(builder, panels, 4 * WIDTH)
    num_tiles = builder.sdiv(plus(builder, rows, MOST_TILE_ROWS - 1), INT64(MOST_TILE_ROWS))

    def of_panel(index: Value, kept: Sequence[Value]) -> Sequence[Value]:
        panel = builder.add(first, index)
        own_codes = builder.add(codes, builder.mul(panel, codes_of_panel))
        own_scales = builder.add(scales, builder.mul(panel, scales_of_panel))

        def of_tile(tile: Value, kept: Sequence[Value]) -> Sequence[Value]:
            row = times(builder, tile, MOST_TILE_ROWS)
            height = _least(builder, INT64(MOST_TILE_ROWS), builder.sub(rows, row))
            stride = times(builder, height, RECORD_BYTES)
            records = builder.add(prepared, times(builder, builder.mul(row, groups), RECORD_BYTES))
            place = builder.add(builder.add(out, builder.mul(row, out_stride)), times(builder, panel, 4 * WIDTH))
            done = INT64(0)
            for size in heights:  # which is a sum of heights

                def compute(
                    index: Value, kept: Sequence[Value], size: int = size, done: Value = done
                ) -> Sequence[Value]:
                    own = builder.add(done, times(builder, index, size))
                    own_records = builder.add(records, times(builder, own, RECORD_BYTES))
                    own_place = builder.add(place, builder.mul(own, out_stride))
                    arguments = [own_records, stride, own_codes, own_scales, units, own_place, out_stride]
                    builder.call(tiles[size], arguments)
                    return kept

                count = builder.sdiv(builder.sub(height, done), INT64(size))
                repeat(builder, count, [], compute)
                done = builder.add(done, times(builder, count, size))
            return kept

        repeat(builder, num_tiles, [], of_tile)
        return kept

    repeat(builder, builder.sub(end, first), [], of_panel)
    builder.ret_void()
    return function


def _tile_function(module: ir.Module, instructions: Instructions, code_format: CodeFormat, height: int) -> ir.Function:
    """`(records, stride, codes, scales, units, out, out_stride)`: `height` rows by one panel.

    `stride`: from a record of one group to that of the next.
    """
    function = _function(module, f"tile_{code_format.name}_{height}_{instructions.name}", 7, instructions)
    set.add(function.attributes, "noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    records, stride, codes, scales, units, out, out_stride = function.args
    kind = code_format.scales
    groups_of_unit = kind.inputs // GROUP_INPUTS
    start = [constant(VECTOR, 0.0)] * height

    def of_unit(unit: Value, totals: Sequence[Value]) -> Sequence[Value]:
        of_scales = builder.add(scales, times(builder, unit, kind.num_bytes))
        first_group = times(builder, unit, groups_of_unit)
        shared = [from_halves(builder, plus(builder, of_scales, 2 * WIDTH * at)) for at in range(kind.num_halves)]
        of_groups = plus(builder, of_scales, 2 * WIDTH * kind.num_halves)

        def of_group(index: Value, totals: Sequence[Value]) -> Sequence[Value]:
            group = builder.add(first_group, index)
            of_codes = builder.add(codes, times(builder, group, code_format.group_bytes))
            record = builder.add(records, builder.mul(group, stride))
            small = builder.add(of_groups, times(builder, index, kind.group_bytes))
            return _add_group(builder, instructions, code_format, totals, record, of_codes, shared, small)

        if groups_of_unit == 1:
            return of_group(INT64(0), totals)
        return repeat(builder, INT64(groups_of_unit), totals, of_group)

    totals = repeat(builder, units, start, of_unit)
    place = out
    for total in totals:
        store(builder, total, place)
        place = builder.add(place, out_stride)
    builder.ret_void()
    return function


def _add_group(
    builder: ir.IRBuilder,
    instructions: Instructions,
    code_format: CodeFormat,
    totals: Sequence[Value],
    record: Value,
    codes: Value,
    shared: Sequence[Value],
    small: Value,
) -> list[Value]:
    """`totals` with the products of one group. `small`: the address of the group's own scales."""
    weights = WIDENED[code_format.bits](builder, codes)
    if code_format.bits == 8 and instructions.has_signed_codes:
        weights = [builder.xor(one, constant(BYTES, 0x80)) for one in weights]
    is_signed = code_format.bits == 8 and instructions.has_signed_codes
    scales, least = scales_of(builder, code_format.scales, shared, small)
    added = []
    for row, total in enumerate(totals):
        own = plus(builder, record, row * RECORD_BYTES)
        step = splat(builder, load(builder, plus(builder, own, STEP_PLACE), SINGLE))
        for part, scale in enumerate(scales):
            length = _VECTORS_OF_GROUP // len(scales)
            place = OFFSETS_PLACE + 4 * (part if len(scales) > 1 else 2)
            sums = constant(WHOLE, 0)
            if code_format.offset and not is_signed:
                sums = splat(builder, load(builder, plus(builder, own, place), INT32))
            for at in range(part * length, (part + 1) * length):
                four = load(builder, plus(builder, own, 4 * at), INT32)
                sums = instructions.sums(builder, sums, weights[at], four, is_signed=is_signed)
            product = builder.fmul(builder.sitofp(sums, VECTOR), step)
            total = call(builder, "llvm.fma.v16f32", VECTOR, product, scale, total)
        if least is not None:
            factor = splat(builder, load(builder, plus(builder, own, LEAST_PLACE), SINGLE))
            total = call(builder, "llvm.fma.v16f32", VECTOR, least, factor, total)
        added.append(total)
    return added
