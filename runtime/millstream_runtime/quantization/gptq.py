"""AutoGPTQ's and gptqmodel's packing (Frantar et al. 2022, arXiv 2210.17323), of 4 and 8 bits.

    qweight   int32 [in / per word, out]       consecutive inputs of one output in a word, the first in the lowest bits
    qzeros    int32 [groups, out / per word]   consecutive outputs in a word; the first version stores them minus one
    scales    float16 [groups, out]
    g_idx     int32 [in]                       the group of each input; act-order quantizes inputs in another order

With act-order a rank needs the scales of all groups, because its inputs belong to any of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream_runtime.models.linear.shares import Size, kept_size, total_size
from millstream_runtime.quantization.group_index import groups_of
from millstream_runtime.quantization.quantized_layout import (
    QuantizedLayout,
    Unpacked,
    groups_within,
    packed,
    unpack_words,
)
from millstream_runtime.quantization.weight_layout import FLOATS, TensorSource


@dataclass(frozen=True)
class GptqLayout(QuantizedLayout):
    """See `formats.GptqFormat`."""

    bits: int
    group_size: int | None
    act_order: bool
    zeros_minus_one: bool

    def unpack(self, source: TensorSource, module: str, outputs: Size, inputs: Size) -> Unpacked | None:
        per_word = 32 // self.bits
        groups, group_of_input = groups_of(
            source, f"{module}.g_idx", inputs, self.group_size, is_required=self.act_order
        )
        codes = source.read(f"{module}.qweight", (packed(inputs, per_word, module), outputs), ("I32",))
        zeros = source.read(f"{module}.qzeros", (groups, packed(outputs, per_word, module)), ("I32",))
        scales = source.read(f"{module}.scales", (groups, outputs), FLOATS)
        if source.device.type == "meta":
            return None
        codes = unpack_words(codes.t().contiguous(), self.bits).t().contiguous()
        unpacked_zeros = unpack_words(zeros, self.bits)
        if self.zeros_minus_one:
            unpacked_zeros = (unpacked_zeros + 1) & ((1 << self.bits) - 1)
        return Unpacked(codes, scales.clone(), f"{module}.scales", unpacked_zeros, group_of_input)

    def planned_bytes(self, outputs: Size, inputs: Size) -> int:
        groups = groups_within(inputs, self.group_size)[0]
        num_groups = total_size(groups) if self.act_order else kept_size(groups)
        of_groups = num_groups * kept_size(outputs) * (16 + self.bits) // 8
        order = 4 * kept_size(inputs) if self.act_order and num_groups > 1 else 0
        return kept_size(outputs) * kept_size(inputs) * self.bits // 8 + of_groups + order
