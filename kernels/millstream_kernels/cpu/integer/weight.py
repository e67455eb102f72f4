"""A weight in codes of 4 to 8 bits as `integer_product` reads it, and products of rows by it.

    codes      uint8 [panels, bytes of a panel's codes]        what lies where: `layouts`
    scales     uint8 [panels, bytes of a panel's scales]

Outputs that fill no panel are padded with zeros, whose scales are zero, too.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError
from millstream_kernels.cpu.integer.layouts import GROUP_INPUTS, PANEL_OUTPUTS, RECORD_BYTES, CodeFormat
from millstream_kernels.cpu.loaded_code import LoadedCode
from millstream_kernels.cpu.task import IntegerProductField, IntegerRowsField

# Multiplications that another thread is worth waking for, and numbers that each thread rounds for itself sooner than
# that it waits for the others.
MULTIPLICATIONS_OF_TEAM, NUMBERS_OF_EACH = 1 << 18, 1 << 14
_VECTOR_BYTES, _INPUTS_AT_ONCE, _VECTORS = 64, 4, 8

_RowsTask = ctypes.c_int64 * len(IntegerRowsField)
_ProductTask = ctypes.c_int64 * len(IntegerProductField)


@dataclass(frozen=True, slots=True)
class OutputCodes:
    """Codes and scales of some outputs, by output.

    Attributes:
        codes: uint8 `[out, in]`, from 0 on.
        halves: the float16 scales' bytes, uint8 `[out, units, ScaleLayout.num_halves, 2]`.
        small: whole numbers of groups, uint8 `[out, units, ScaleLayout.inputs / 32 * ScaleLayout.group_bytes / 16]`.
    """

    codes: Tensor
    halves: Tensor
    small: Tensor


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """See the top of the file."""

    code_format: CodeFormat
    codes: Tensor
    scales: Tensor
    num_outputs: int
    num_inputs: int

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + self.scales.numel()

    def write(self, outputs: OutputCodes, first: int) -> None:
        """Write the outputs `first`, `first + 1`, ..; `first` is a multiple of 16."""
        kind = self.code_format.scales
        count, panel = len(outputs.codes), first // PANEL_OUTPUTS
        end = panel - (-count // PANEL_OUTPUTS)
        groups = outputs.codes.view(count, -1, _VECTORS, _INPUTS_AT_ONCE)
        stored = _STORED[self.code_format.bits](groups)
        # [out, groups, vectors, 4] to [panels, groups, vectors, out, 4]
        self.codes[panel:end].copy_(_in_panels(stored).permute(0, 2, 3, 1, 4).flatten(1))
        halves = _in_panels(outputs.halves).permute(0, 2, 3, 1, 4).flatten(3).flatten(2)
        parts = [halves]
        if kind.group_bytes:
            parts.append(_in_panels(outputs.small).permute(0, 2, 3, 1).flatten(2))
        self.scales[panel:end].copy_(torch.cat(parts, 2).flatten(1))

    def with_outputs(self, order: list[int]) -> IntegerWeight:
        """Return the same with output `i` taken from output `order[i]`."""
        kind, index = self.code_format.scales, torch.tensor(order)
        units = self.num_inputs // kind.inputs
        codes = self.codes.view(len(self.codes), -1, PANEL_OUTPUTS, _INPUTS_AT_ONCE)
        halves_end = 2 * PANEL_OUTPUTS * kind.num_halves
        scales = self.scales.view(len(self.scales), units, kind.num_bytes)
        halves = scales[..., :halves_end].unflatten(2, (kind.num_halves, PANEL_OUTPUTS, 2))
        small = scales[..., halves_end:].unflatten(2, (-1, PANEL_OUTPUTS)) if kind.group_bytes else None
        chosen = _in_panels(codes.permute(0, 2, 1, 3).flatten(0, 1).index_select(0, index))
        parts = [_in_panels(halves.permute(0, 3, 1, 2, 4).flatten(0, 1).index_select(0, index))]
        parts = [parts[0].permute(0, 2, 3, 1, 4).flatten(3).flatten(2)]
        if small is not None:
            own = _in_panels(small.permute(0, 3, 1, 2).flatten(0, 1).index_select(0, index))
            parts.append(own.permute(0, 2, 3, 1).flatten(2))
        return IntegerWeight(
            self.code_format,
            chosen.permute(0, 2, 1, 3).flatten(1).contiguous(),
            torch.cat(parts, 2).flatten(1).contiguous(),
            len(order),
            self.num_inputs,
        )


def empty_weight(code_format: CodeFormat, num_outputs: int, num_inputs: int) -> IntegerWeight:
    """Return a weight to be written.

    Raises:
        KernelArgumentError: inputs are no whole number of scale units.
    """
    kind = code_format.scales
    if num_inputs % kind.inputs:
        raise KernelArgumentError("num_inputs", f"is {num_inputs}, no multiple of {kind.inputs}")
    panels = -(-num_outputs // PANEL_OUTPUTS)
    codes = torch.empty(panels, num_inputs // GROUP_INPUTS * code_format.group_bytes, dtype=torch.uint8)
    scales = torch.empty(panels, num_inputs // kind.inputs * kind.num_bytes, dtype=torch.uint8)
    return IntegerWeight(code_format, codes, scales, num_outputs, num_inputs)


def integer_product(code: LoadedCode, instructions: str, x: Tensor, weight: IntegerWeight) -> Tensor:
    """`x` `[T, in]` times the weight, float32 `[T, out]`. `instructions`: one of `task.INTEGER_INSTRUCTIONS`.

    Raises:
        KernelArgumentError: a type, a device or a shape that the kernel does not take; names the argument.
    """
    x = x.contiguous()
    if x.dtype is not torch.float32 or not x.is_cpu:
        raise KernelArgumentError("x", "is not float32 in a CPU's memory")
    rows, inputs = x.shape
    if inputs != weight.num_inputs:
        raise KernelArgumentError("x", f"has rows of {inputs} numbers, and the weight has {weight.num_inputs} inputs")
    panels = len(weight.codes)
    outputs = panels * PANEL_OUTPUTS
    out = x.new_empty(rows, outputs)
    if rows:
        worth = rows * inputs * outputs // MULTIPLICATIONS_OF_TEAM
        threads = max(1, min(torch.get_num_threads(), panels, worth))
        _run(code, instructions, x, weight, out, threads)
    return out if outputs == weight.num_outputs else out[:, : weight.num_outputs]


def _run(code: LoadedCode, instructions: str, x: Tensor, weight: IntegerWeight, out: Tensor, num_threads: int) -> None:
    rows, inputs = x.shape
    own_format = weight.code_format
    record_bytes = rows * (inputs // GROUP_INPUTS) * RECORD_BYTES
    source, scratch_bytes = 0, 0
    if rows * inputs <= NUMBERS_OF_EACH:
        source, scratch_bytes = x.data_ptr(), -(-record_bytes // 64) * 64
        records = torch.empty(num_threads * scratch_bytes, dtype=torch.uint8)
    else:
        records = torch.empty(record_bytes, dtype=torch.uint8)
        task = _RowsTask(x.data_ptr(), records.data_ptr(), rows, inputs, own_format.offset)
        code.run(f"integer_rows_{instructions}", ctypes.addressof(task), num_threads)
    product = _ProductTask(
        source,
        records.data_ptr(),
        scratch_bytes,
        weight.codes.data_ptr(),
        weight.scales.data_ptr(),
        out.data_ptr(),
        rows,
        inputs,
        len(weight.codes),
        own_format.number,
        own_format.offset,
    )
    code.run(f"integer_product_{instructions}", ctypes.addressof(product), num_threads)


def _in_panels(by_output: Tensor) -> Tensor:
    """`[out, ..]` to `[panels, 16, ..]`, with zeros behind the last output."""
    missing = -len(by_output) % PANEL_OUTPUTS
    if missing:
        by_output = torch.cat((by_output, by_output.new_zeros(missing, *by_output.shape[1:])))
    panels: Tensor = by_output.unflatten(0, (-1, PANEL_OUTPUTS))
    return panels


def _four_bits(codes: Tensor) -> Tensor:
    low = codes & 15
    return low[:, :, :4] | (low[:, :, 4:] << 4)


def _five_bits(codes: Tensor) -> Tensor:
    places = torch.arange(_VECTORS, dtype=torch.uint8).view(_VECTORS, 1)
    high = ((codes >> 4) << places).sum(2, keepdim=True, dtype=torch.uint8)
    return torch.cat((_four_bits(codes), high), 2)


def _six_bits(codes: Tensor) -> Tensor:
    places = 2 * torch.arange(4, dtype=torch.uint8).view(4, 1)
    high = ((codes >> 4).unflatten(2, (2, 4)) << places).sum(3, dtype=torch.uint8)
    return torch.cat((_four_bits(codes), high), 2)


# Widened codes [out, groups, 8 vectors, 4] as they are stored, [out, groups, vectors, 4].
_STORED = {4: _four_bits, 5: _five_bits, 6: _six_bits, 8: lambda codes: codes}
