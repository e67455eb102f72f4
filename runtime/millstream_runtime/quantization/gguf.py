"""GGUF's blocks: for a linear module one tensor, whose rows are whole blocks.

    blocks    uint8 [out, in / elements of a block * bytes of a block]

The name is not one of the file: `models/loading/gguf_checkpoint.py` gives every tensor in blocks under it, its rows in
the order of Hugging Face, and under `weight` dequantized. Under tensor parallelism a rank reads whole blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.gguf.block_types import BLOCK_TYPES, BlockType
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.models.linear.shares import Cut, Size, kept_size
from millstream_runtime.quantization.block_weight import BlockWeight
from millstream_runtime.quantization.gguf_blocks import scales_are_finite
from millstream_runtime.quantization.implementations import linear_for
from millstream_runtime.quantization.quantized_layout import invalid_tensor, packed
from millstream_runtime.quantization.quantized_linear import PlannedLinear
from millstream_runtime.quantization.weight_layout import TensorSource


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """See `WeightLayout`. `type_name`: of a quantized block type."""

    type_name: str

    @property
    def kind(self) -> BlockType:
        return BLOCK_TYPES[self.type_name]

    def linear(self, source: TensorSource, parts: Mapping[str, Size], in_features: Size, bias: Tensor | None) -> Linear:
        weight = self._read(source, parts, in_features)
        if weight is None:
            num_outputs = sum(map(kept_size, parts.values()))
            source.count(num_outputs * self.kind.row_bytes(kept_size(in_features)))
            return PlannedLinear(bias)
        return linear_for(source, weight, bias)

    def dense_weight(self, source: TensorSource, module: str, out_features: Size, in_features: Size) -> Tensor:
        found = self._read(source, {module: out_features}, in_features)
        weight = source.empty(kept_size(out_features), kept_size(in_features))
        return weight if found is None else weight.copy_(found.dense(source.dtype).t())

    def _read(self, source: TensorSource, parts: Mapping[str, Size], in_features: Size) -> BlockWeight | None:
        found = []
        for module, size in parts.items():
            row = _bytes_of_blocks(packed(in_features, self.kind.block_elements, module), self.kind.block_bytes)
            stored = source.read(f"{module}.blocks", (size, row), ("U8",))
            if source.device.type == "meta":
                continue
            if not scales_are_finite(stored.reshape(-1, self.kind.block_bytes), self.kind):
                raise invalid_tensor(f"{module}.weight", f"({self.type_name}) holds NaN or infinite scales")
            found.append(stored)
        if len(found) < len(parts):
            return None
        return BlockWeight(torch.cat(found), self.kind, kept_size(in_features))  # cat copies: the file may be replaced


def _bytes_of_blocks(blocks: Size, block_bytes: int) -> Size:
    if isinstance(blocks, int):
        return blocks * block_bytes
    kept = tuple(range(one.start * block_bytes, one.stop * block_bytes) for one in blocks.kept)
    return Cut(blocks.total * block_bytes, kept)
