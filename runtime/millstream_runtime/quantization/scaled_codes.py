"""Layouts that store one 8-bit code per weight, `[out, in]`, and scales: FP8 (e4m3) and INT8.

    FP8             weight float8_e4m3 · weight_scale, or weight_scale_inv of blocks (multiplied, in spite of its name)
    INT8            weight int8 · weight_scale
    bitsandbytes    weight int8 · SCB / 127 (Dettmers et al. 2022, arXiv 2208.07339)

A scale is that of the tensor, of an output, of an output and a group of inputs, or of a block of both. Files write
dimensions of size one or leave them out. Scales of activations are not read: where activations are quantized, each row
is by its own largest number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.models.linear.shares import Size, kept_size, total_size
from millstream_runtime.quantization.quantized_layout import QuantizedLayout, Unpacked, groups_within, invalid_tensor
from millstream_runtime.quantization.weight_layout import TensorSource
from millstream_runtime.quantization_config.formats import ScaledCodesFormat

SCALE_BYTES, COLUMN_BYTES = 4, 4
BITSANDBYTES_SCALE = "SCB"


@dataclass(frozen=True)
class ScaledCodesLayout(QuantizedLayout):
    """See `formats.ScaledCodesFormat`."""

    stored: ScaledCodesFormat
    bits = 8

    @property
    def quantizes_activations(self) -> bool:  # type: ignore[override]
        return self.stored.has_int8_activations

    def unpack(self, source: TensorSource, module: str, outputs: Size, inputs: Size) -> Unpacked | None:
        dtype = "F8_E4M3" if self.stored.is_float else "I8"
        codes = source.read(f"{module}.weight", (outputs, inputs), (dtype,))
        groups, group_of_input = groups_within(inputs, self.stored.scaled_inputs)
        scale_shape: tuple[Size, ...] = (self._rows(outputs), groups)
        self._check_order(source, module)
        scales_name = f"{module}.{self.stored.scale_name}"
        scales = source.read_scale(scales_name, scale_shape)
        if source.device.type == "meta":
            return None
        codes = codes.view(torch.uint8).t().contiguous().view(codes.dtype)
        scales = scales.t().float() / self.stored.scale_divisor
        return Unpacked(codes, scales.contiguous(), scales_name, 0, group_of_input, self._columns(outputs))

    def planned_bytes(self, outputs: Size, inputs: Size) -> int:
        num_groups = kept_size(groups_within(inputs, self.stored.scaled_inputs)[0])
        scales_bytes = kept_size(self._rows(outputs)) * num_groups * SCALE_BYTES
        columns_bytes = 0 if self.stored.scaled_outputs == 1 else kept_size(outputs) * COLUMN_BYTES
        return kept_size(outputs) * kept_size(inputs) + scales_bytes + columns_bytes

    def _check_order(self, source: TensorSource, module: str) -> None:
        """bitsandbytes once stored weights in the order of a GPU's matrix units."""
        if self.stored.scale_name != BITSANDBYTES_SCALE:
            return
        order = source.read_optional(f"{module}.weight_format", (), ("U8",))
        if order is not None and int(order) != 0:
            raise invalid_tensor(f"{module}.weight_format", f"is {int(order)}; only 0, rows one after another, is read")

    def _rows(self, outputs: Size) -> Size:
        """Rows of the scales: this rank's outputs, or all blocks of outputs, which a share may begin or end within."""
        if self.stored.scaled_outputs == 1:
            return outputs
        return 1 if self.stored.scaled_outputs is None else -(-total_size(outputs) // self.stored.scaled_outputs)

    def _columns(self, outputs: Size) -> Tensor | None:
        """For each output its column of the scales."""
        if self.stored.scaled_outputs == 1:
            return None
        kept = [range(outputs)] if isinstance(outputs, int) else [*outputs.kept]
        numbers = torch.cat([torch.arange(one.start, one.stop) for one in kept])
        return (numbers // (self.stored.scaled_outputs or total_size(outputs))).to(torch.int32)
