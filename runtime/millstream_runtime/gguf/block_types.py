"""How a GGUF file stores the elements of a tensor: plain numbers, or blocks with scales. Facts only.

A row of a tensor is a whole number of blocks. `quantization/gguf_blocks.py` computes with them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockType:
    """One type of ggml. `halves`: where a block has float16 scales, in bytes from its beginning."""

    name: str
    number: int  # in the file
    block_elements: int
    block_bytes: int
    halves: tuple[int, ...] = ()

    @property
    def is_quantized(self) -> bool:
        return self.block_elements > 1

    def row_bytes(self, elements: int) -> int:
        """Of a row of so many elements, a multiple of `block_elements`."""
        return elements // self.block_elements * self.block_bytes


BLOCK_TYPES = {
    one.name: one
    for one in (
        BlockType("F32", 0, 1, 4),
        BlockType("F16", 1, 1, 2),
        BlockType("BF16", 30, 1, 2),
        BlockType("Q4_0", 2, 32, 18, (0,)),
        BlockType("Q4_1", 3, 32, 20, (0, 2)),
        BlockType("Q5_0", 6, 32, 22, (0,)),
        BlockType("Q5_1", 7, 32, 24, (0, 2)),
        BlockType("Q8_0", 8, 32, 34, (0,)),
        BlockType("Q2_K", 10, 256, 84, (80, 82)),
        BlockType("Q3_K", 11, 256, 110, (108,)),
        BlockType("Q4_K", 12, 256, 144, (0, 2)),
        BlockType("Q5_K", 13, 256, 176, (0, 2)),
        BlockType("Q6_K", 14, 256, 210, (208,)),
        BlockType("IQ4_NL", 20, 32, 18, (0,)),
    )
}
BY_NUMBER = {one.number: one for one in BLOCK_TYPES.values()}
# Names of the types that are not read, for messages.
OTHER_NAMES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
