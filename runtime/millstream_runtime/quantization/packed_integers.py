"""compressed-tensors' `pack-quantized`: integers of 4 and 8 bits, packed along the inputs.

weight_packed        int32 [out, in / per word]        the first input in the lowest bits, each plus 2 ** (bits - 1)
weight_scale         floats [out, groups]
weight_zero_point    int32 [out / per word, groups]    packed along the outputs; absent where symmetric
weight_g_idx         int32 [in]                        the group of each input; absent without act-order
weight_shape         int64 [2]                         outputs and inputs
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.models.linear.shares import Size, kept_size, total_size
from millstream_runtime.quantization.group_index import groups_of
from millstream_runtime.quantization.quantized_layout import (
    QuantizedLayout,
    Unpacked,
    invalid_tensor,
    packed,
    unpack_words,
)
from millstream_runtime.quantization.weight_layout import FLOATS, TensorSource
from millstream_runtime.quantization_config.formats import PackedIntegersFormat


@dataclass(frozen=True)
class PackedIntegersLayout(QuantizedLayout):
    """See `formats.PackedIntegersFormat`."""

    stored: PackedIntegersFormat

    @property
    def bits(self) -> int:  # type: ignore[override]
        return self.stored.bits

    def unpack(self, source: TensorSource, module: str, outputs: Size, inputs: Size) -> Unpacked | None:
        per_word = 32 // self.bits
        shape = source.read_optional(f"{module}.weight_shape", (2,), ("I64", "I32"))
        groups, group_of_input = groups_of(
            source, f"{module}.weight_g_idx", inputs, self.stored.group_size, is_required=self.stored.act_order
        )
        codes = source.read(f"{module}.weight_packed", (outputs, packed(inputs, per_word, module)), ("I32",))
        scales = source.read(f"{module}.weight_scale", (outputs, groups), FLOATS)
        zeros = self._zeros(source, module, outputs, groups)
        if source.device.type == "meta":
            return None
        described = [total_size(outputs), total_size(inputs)]
        if shape is not None and shape.tolist() != described:
            raise invalid_tensor(f"{module}.weight_shape", f"is {shape.tolist()}, but config.json asks for {described}")
        return Unpacked(
            codes=unpack_words(codes, self.bits).t().contiguous(),
            scales=scales.t().clone(memory_format=torch.contiguous_format),
            scales_name=f"{module}.weight_scale",
            zeros=zeros,
            groups=group_of_input,
        )

    def planned_bytes(self, outputs: Size, inputs: Size) -> int:
        size = self.stored.group_size or total_size(inputs)
        num_groups = -(-(total_size(inputs) if self.stored.act_order else kept_size(inputs)) // size)
        zero_bits = 0 if self.stored.symmetric else self.bits
        of_groups = num_groups * kept_size(outputs) * (16 + zero_bits) // 8
        order = 4 * kept_size(inputs) if self.stored.act_order and num_groups > 1 else 0
        return kept_size(outputs) * kept_size(inputs) * self.bits // 8 + of_groups + order

    def _zeros(self, source: TensorSource, module: str, outputs: Size, groups: Size) -> Tensor | int:
        """uint8 `[groups, out]`; or the offset of all codes."""
        if self.stored.symmetric:
            return 1 << (self.bits - 1)
        words = packed(outputs, 32 // self.bits, module)
        stored = source.read(f"{module}.weight_zero_point", (words, groups), ("I32",))
        if source.device.type == "meta":
            return 0
        return unpack_words(stored.t().contiguous(), self.bits)
