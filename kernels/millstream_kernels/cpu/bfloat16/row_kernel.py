"""One row times a bfloat16 weight in oneDNN's blocks, with the bits that oneDNN gives the row among others.

    x        bfloat16 [INPUT_BLOCKS * 32]
    weight   bfloat16 [OUTPUT_BLOCKS][INPUT_BLOCKS][16 pairs of inputs][64 outputs][2 inputs]: oneDNN's `BA16a64b2a`
    out      float32 [OUTPUT_BLOCKS * 64]: rounded to bfloat16, and widened

A decode of one request reads each weight once, so it takes as long as the memory does. oneDNN's product of one row
walks through one block of outputs at a time and asks the memory for one place; this one walks through two side by side
and names the places ahead (`python -m benchmarks.cpu_mechanisms` compares them).

VDPBF16PS adds the products of a pair of inputs to a float32. oneDNN starts a new sum at every 512th or 1,024th input
and adds these sums up; so does this. `one_row` finds out where the library and the CPU at hand start one.

This is LLVM's language, not numba's: a function of it can name the instructions that it needs, which the CPU that the
rest is compiled for lacks. Only the compiler imports this (`hack.kernels.prebuild_cpu`).
"""

from __future__ import annotations

from millstream_kernels.cpu.task import BLOCK_INPUTS, BLOCK_OUTPUTS, RowField

PAIRS = BLOCK_INPUTS // 2
VECTORS = BLOCK_OUTPUTS // 16  # of 16 sums
BLOCK_BYTES = 2 * BLOCK_INPUTS * BLOCK_OUTPUTS
PAIR_BYTES, VECTOR_BYTES = BLOCK_BYTES // PAIRS, 64
AHEAD_BYTES = 1024  # of a block's place in memory that is named before it is read

TARGET = (
    'attributes #0 = { "target-features"="+avx512f,+avx512bw,+avx512vl,+avx512bf16" "min-legal-vector-width"="512" '
    '"prefer-vector-width"="512" }'
)
DECLARATIONS = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
"""
# What each kernel is called with: see `prebuild_cpu.ENTRIES`. Pairs of blocks first, then the one that may be left.
KERNEL = """
define i32 @bfloat16_row(ptr %result, ptr %error, ptr %task, i64 %part, i64 %step) #0 {{
  {blocks}
  %begin = mul i64 %output_blocks, %part
  %first = sdiv i64 %begin, %step
  %after = add i64 %part, 1
  %finish = mul i64 %output_blocks, %after
  %end = sdiv i64 %finish, %step
  %count = sub i64 %end, %first
  %odd = and i64 %count, 1
  %even = sub i64 %end, %odd
  call void @bfloat16_row_by_2(ptr %task, i64 %first, i64 %even)
  call void @bfloat16_row_by_1(ptr %task, i64 %even, i64 %end)
  ret i32 0
}}
"""


def module_text() -> str:
    """The kernel `bfloat16_row`, as a module of LLVM's language."""
    kernel = KERNEL.format(blocks=_field(RowField.OUTPUT_BLOCKS))
    return "\n".join([DECLARATIONS, _blocks_side_by_side(2), _blocks_side_by_side(1), kernel, TARGET])


def _field(field: RowField) -> str:
    """Read a field of the task into a variable of its name."""
    name = field.name.lower()
    return f"%{name}.place = getelementptr i64, ptr %task, i64 {field.value}\n  %{name} = load i64, ptr %{name}.place"


def _blocks_side_by_side(count: int) -> str:
    """A function for blocks of outputs `%first` to `%end`, `count` at a time."""
    sums = range(VECTORS * count)
    lines = [
        f"define internal void @bfloat16_row_by_{count}(ptr %task, i64 %first, i64 %end) #0 {{",
        "entry:",
        *(f"  {_field(field)}" for field in RowField),
        "  %xp = inttoptr i64 %x to ptr",
        "  %w = inttoptr i64 %weight to ptr",
        "  %outp = inttoptr i64 %out to ptr",
        f"  %bytes = mul i64 %input_blocks, {BLOCK_BYTES}",
        "  %some = icmp slt i64 %first, %end",
        "  br i1 %some, label %outputs, label %done",
        "outputs:",
        "  %n = phi i64 [%first, %entry], [%next, %stored]",
        "  %start = mul i64 %n, %bytes",
    ]
    for block in range(count):
        lines += [
            f"  %skip{block} = mul i64 %bytes, {block}",
            f"  %from{block} = add i64 %start, %skip{block}",
            f"  %w{block} = getelementptr i8, ptr %w, i64 %from{block}",
        ]
    lines += ["  br label %sums", "sums:", "  %c = phi i64 [0, %outputs], [%stop, %added]"]
    lines += [f"  %total{i} = phi <16 x float> [zeroinitializer, %outputs], [%grown{i}, %added]" for i in sums]
    lines += [
        "  %until = add i64 %c, %sum_blocks",
        "  %within = icmp slt i64 %until, %input_blocks",
        "  %stop = select i1 %within, i64 %until, i64 %input_blocks",
        "  br label %block",
        "block:",
        "  %k = phi i64 [%c, %sums], [%k.next, %block]",
    ]
    lines += [f"  %s{i} = phi <16 x float> [zeroinitializer, %sums], [%s{i}.{PAIRS - 1}, %block]" for i in sums]
    lines += [
        f"  %offset = mul i64 %k, {BLOCK_BYTES}",
        f"  %x.offset = mul i64 %k, {2 * BLOCK_INPUTS}",
        "  %xk = getelementptr i8, ptr %xp, i64 %x.offset",
        *(f"  %wk{block} = getelementptr i8, ptr %w{block}, i64 %offset" for block in range(count)),
    ]
    for pair in range(PAIRS):
        lines += _add_pair(pair, count)
    lines += [
        "  %k.next = add i64 %k, 1",
        "  %more = icmp slt i64 %k.next, %stop",
        "  br i1 %more, label %block, label %added",
        "added:",
        *(f"  %grown{i} = fadd <16 x float> %total{i}, %s{i}.{PAIRS - 1}" for i in sums),
        "  %left = icmp slt i64 %stop, %input_blocks",
        "  br i1 %left, label %sums, label %stored",
        "stored:",
        f"  %out.offset = mul i64 %n, {4 * BLOCK_OUTPUTS}",
        "  %row = getelementptr i8, ptr %outp, i64 %out.offset",
    ]
    for i in sums:
        lines += [
            f"  %rounded{i} = fptrunc <16 x float> %grown{i} to <16 x bfloat>",
            f"  %wide{i} = fpext <16 x bfloat> %rounded{i} to <16 x float>",
            f"  %to{i} = getelementptr i8, ptr %row, i64 {i * VECTOR_BYTES}",
            f"  store <16 x float> %wide{i}, ptr %to{i}, align 4",
        ]
    lines += [
        f"  %next = add i64 %n, {count}",
        "  %others = icmp slt i64 %next, %end",
        "  br i1 %others, label %outputs, label %done",
        "done:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


def _add_pair(pair: int, count: int) -> list[str]:
    """Two inputs times their weights, to all sums."""
    lines = [
        f"  %xq{pair} = getelementptr i32, ptr %xk, i64 {pair}",
        f"  %xi{pair} = load i32, ptr %xq{pair}, align 2",
        f"  %xv{pair} = insertelement <16 x i32> poison, i32 %xi{pair}, i32 0",
        f"  %xs{pair} = shufflevector <16 x i32> %xv{pair}, <16 x i32> poison, <16 x i32> zeroinitializer",
        f"  %xb{pair} = bitcast <16 x i32> %xs{pair} to <32 x bfloat>",
    ]
    for block in range(count):
        for vector in range(VECTORS):
            i = VECTORS * block + vector
            offset = pair * PAIR_BYTES + vector * VECTOR_BYTES
            before = f"%s{i}" if pair == 0 else f"%s{i}.{pair - 1}"
            lines += [
                f"  %p{i}.{pair} = getelementptr i8, ptr %wk{block}, i64 {offset}",
                f"  %v{i}.{pair} = load <32 x bfloat>, ptr %p{i}.{pair}, align 2",
                f"  %s{i}.{pair} = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> {before}, "
                f"<32 x bfloat> %xb{pair}, <32 x bfloat> %v{i}.{pair})",
                f"  %a{i}.{pair} = getelementptr i8, ptr %wk{block}, i64 {offset + AHEAD_BYTES}",
                f"  call void @llvm.prefetch.p0(ptr %a{i}.{pair}, i32 0, i32 3, i32 1)",
            ]
    return lines
