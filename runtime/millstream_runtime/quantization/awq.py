"""AutoAWQ's GEMM packing (Lin et al. 2023, arXiv 2306.00978).

    qweight   int32 [in, out / 8]       eight outputs per word
    qzeros    int32 [groups, out / 8]   packed alike, stored as they are
    scales    float16 [groups, out]

Half-byte `i` of a word holds output `(0, 2, 4, 6, 1, 3, 5, 7)[i]` of its eight.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.linear.shares import Size, kept_size, total_size
from millstream_runtime.quantization.quantized_layout import (
    QuantizedLayout,
    Unpacked,
    groups_within,
    packed,
    unpack_words,
)
from millstream_runtime.quantization.weight_layout import FLOATS, TensorSource

PER_WORD = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 to 7 in a word: the inverse of the order above


@dataclass(frozen=True)
class AwqLayout(QuantizedLayout):
    """`group_size` None: one group per column."""

    group_size: int | None
    bits = 4

    def unpack(self, source: TensorSource, module: str, outputs: Size, inputs: Size) -> Unpacked | None:
        words, num_inputs = packed(outputs, PER_WORD, module), total_size(inputs)
        if self.group_size and num_inputs > self.group_size and num_inputs % self.group_size:
            raise RuntimeFailure(
                FailureReason.CHECKPOINT_INVALID,
                f"quantization_config.group_size is {self.group_size}, which does not divide the {num_inputs} inputs "
                f"of {module}; quantization_config does not belong to this model.",
            )
        groups, group_of_input = groups_within(inputs, self.group_size)
        codes = source.read(f"{module}.qweight", (inputs, words), ("I32",))
        zeros = source.read(f"{module}.qzeros", (groups, words), ("I32",))
        scales = source.read(f"{module}.scales", (groups, outputs), FLOATS)
        if source.device.type == "meta":
            return None
        return Unpacked(
            unpack_words(codes, self.bits, PLACES),
            scales.clone(),
            f"{module}.scales",
            unpack_words(zeros, self.bits, PLACES),
            group_of_input,
        )

    def planned_bytes(self, outputs: Size, inputs: Size) -> int:
        num_groups = kept_size(groups_within(inputs, self.group_size)[0])
        return kept_size(outputs) * kept_size(inputs) // 2 + num_groups * kept_size(outputs) * 5 // 2
