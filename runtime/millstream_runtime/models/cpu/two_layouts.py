"""A float32 weight in two layouts on a CPU: the checkpoint's for one row on several threads, oneDNN's own otherwise.

No layout is good for both. One row on several threads is bound by reading the weight, which is quickest as dot products
along the rows of `[out, in]`. On one thread oneDNN's layout takes 0.5 to 0.9 of the time. More rows are bound by how
well registers and caches are used, for which oneDNN cuts the weight into blocks once, at the start, where MKL does it
again in every call:

    GB of weight a second                                  1 row    4 rows   16 rows   256 rows
    MKL on [in, out]                                        10.9       3.7       4.7        0.9
    here                                                    23.2      15.6       9.7        1.5

(gate and up of a 135 M-parameter Llama, two threads of an EPYC: `python -m benchmarks.layouts`.)

The price is a second copy, so there is one only where memory has room to spare for it. Without it a weight is kept as
`[in, out]` (`models.linear`). `torch.compile` packs weights through the same two functions of torch.

oneDNN writes machine code for each shape of product that it meets: a millisecond or more, and half a MiB or more that
is kept. So rows are padded to one of few numbers (`padded_rows`), the warm-up meets those of decodes, and what is kept
has a limit, set where the engine is imported: without either, prompts of 500 lengths meant about a GiB for one small
model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millstream_kernels.cpu import executable_memory

# For how many rows oneDNN should choose its blocks. Those for a prompt's chunk are the best for a few rows, too.
PACKED_FOR_ROWS = 512
MOST_EXACT_ROWS = 16  # as many decodes or fewer are never padded
PADDING_SHARE = 8  # beyond it by less than an eighth
LEAST_PART_ELEMENTS = 1 << 16  # below it waking a thread takes longer than it saves


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of that kind have a packed layout."""
    return (
        dtype == torch.float32
        and device.type == "cpu"
        and torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and executable_memory.refusal() is None  # oneDNN writes machine code
    )


def pack(weight: Tensor) -> Tensor:
    """`weight` `[in, out]`, whose columns follow one another in memory, in oneDNN's layout: opaque, as large."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.t(), PACKED_FOR_ROWS)
    return packed


def product(x: Tensor, weight: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`[T, in]` times `[in, out]`, given in both layouts."""
    num_rows = x.shape[0]
    if not num_rows:
        return x.new_empty(0, weight.shape[1])
    parts = _num_parts(weight) if num_rows == 1 else 1
    if parts == 1:
        several: Tensor = torch.ops.mkldnn._linear_pointwise(_padded(x), packed, bias, "none", [], "")
        return several[:num_rows]
    one = _one_row(x, weight.t(), parts)
    return one if bias is None else one.add_(bias)


def padded_rows(num_rows: int) -> int:
    """The next of the numbers that oneDNN writes code for: all up to MOST_EXACT_ROWS, then eight for each doubling."""
    if num_rows <= MOST_EXACT_ROWS:
        return num_rows
    step = (1 << (num_rows - 1).bit_length() - 1) // PADDING_SHARE
    return -(-num_rows // step) * step


def _padded(x: Tensor) -> Tensor:
    num_rows = x.shape[0]
    wanted = padded_rows(num_rows)
    if wanted == num_rows:
        return x
    padded = x.new_empty(wanted, x.shape[1])
    padded[:num_rows] = x
    padded[num_rows:] = 0.0  # whatever lies there could be slow numbers: denormal ones, NaN
    return padded


def _num_parts(weight: Tensor) -> int:
    """Into how many parts `weight` `[in, out]` is cut for one row: one for each thread that is worth waking."""
    parts = min(torch.get_num_threads(), weight.numel() // LEAST_PART_ELEMENTS)
    while parts > 1 and weight.shape[1] % parts:
        parts -= 1
    return max(1, parts)


def _one_row(x: Tensor, rows: Tensor, parts: int) -> Tensor:
    """`[1, in]` by `rows` `[out, in]`. MKL reads one matrix with one thread and divides a batch among all."""
    batch = torch.unflatten(rows, 0, (parts, rows.shape[0] // parts))
    return torch.bmm(batch, x.t().expand(parts, -1, 1)).view(1, -1)
