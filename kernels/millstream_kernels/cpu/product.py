"""Products by a weight that is held once, in 16 bits: the typed functions of `packed_product`.

The weight lies in panels of 16 outputs, so that a vector is one load. Outputs that fill no panel are padded with zeros.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.cpu.loaded_code import LoadedCode
from millstream_kernels.cpu.task import PANEL_OUTPUTS, Format, ProductField

FORMATS = {torch.bfloat16: Format.BFLOAT16, torch.float16: Format.FLOAT16}
# Multiplications that another thread is worth waking for.
MULTIPLICATIONS_OF_TEAM = 1 << 17

_Task = ctypes.c_int64 * len(ProductField)


def num_panels(num_outputs: int) -> int:
    """Return how many panels a weight takes."""
    return -(-num_outputs // PANEL_OUTPUTS)


def panels_bytes(num_outputs: int, num_inputs: int) -> int:
    """Return the bytes of a weight's panels: 2 for each number, the padding included."""
    return num_panels(num_outputs) * PANEL_OUTPUTS * num_inputs * 2


def pack(rows: Tensor, panels: Tensor, first: int) -> None:
    """Write the outputs `first`, `first + 1`, .. of a weight, `rows` `[n, in]`, into `panels` `[panels, in, 16]`."""
    start = 0
    while start < len(rows):
        panel, place = divmod(first + start, PANEL_OUTPUTS)
        whole = 0 if place else (len(rows) - start) // PANEL_OUTPUTS
        if whole:
            end = start + whole * PANEL_OUTPUTS
            blocks = rows[start:end].unflatten(0, (whole, PANEL_OUTPUTS))
            panels[panel : panel + whole].copy_(blocks.transpose(1, 2))
        else:
            end = min(len(rows), start + PANEL_OUTPUTS - place)
            panels[panel, :, place : place + end - start].copy_(rows[start:end].t())
        start = end


def unpack(panels: Tensor, num_outputs: int) -> Tensor:
    """Return the weight `[out, in]` of such panels."""
    return panels.transpose(1, 2).flatten(0, 1)[:num_outputs]


def rows_of(panels: Tensor, outputs: Tensor) -> Tensor:
    """Return the rows `outputs` (int64 `[n]`) of the weight `[out, in]`, `[n, in]` in its 16 bits."""
    return panels[outputs // PANEL_OUTPUTS, :, outputs % PANEL_OUTPUTS]


def packed_product(code: LoadedCode, x: Tensor, panels: Tensor, num_outputs: int) -> Tensor:
    """`x` `[T, in]` times the weight of `panels` `[panels, in, 16]`, float32 `[T, num_outputs]`.

    Raises:
        KernelArgumentError: a type, a device or a shape that the kernel does not take; names the argument.
    """
    x = x.contiguous()
    if x.dtype is not torch.float32 or not x.is_cpu:
        raise KernelArgumentError("x", "is not float32 in a CPU's memory")
    if panels.dtype not in FORMATS or not panels.is_cpu or not panels.is_contiguous() or panels.dim() != 3:
        raise KernelArgumentError("panels", "are not 16-bit panels, contiguous, in a CPU's memory")
    count, inputs, width = panels.shape
    rows, own_inputs = x.shape
    if own_inputs != inputs:
        raise KernelArgumentError("x", f"has rows of {own_inputs} numbers, and the weight has {inputs} inputs")
    if width != PANEL_OUTPUTS or count != num_panels(num_outputs):
        raise KernelArgumentError("panels", f"are {[*panels.shape]}, of {num_outputs} outputs")
    outputs = count * PANEL_OUTPUTS
    out = x.new_empty(rows, outputs)
    if rows:
        task = _Task(x.data_ptr(), panels.data_ptr(), out.data_ptr(), rows, inputs, count, FORMATS[panels.dtype])
        worth = rows * inputs * outputs // MULTIPLICATIONS_OF_TEAM
        code.run("packed_product", ctypes.addressof(task), max(1, min(torch.get_num_threads(), count, worth)))
    return out if outputs == num_outputs else out[:, :num_outputs]
