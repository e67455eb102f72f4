"""The KV pool: one tensor a layer, cut into blocks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millstream_runtime.models.config import ModelConfig


class KVCache:
    """`layers[i]`: `[num_blocks, block_size_tokens, 2 * KV, D]`, the keys of a token beside its values.

    Where all heads share one latent key that is the value too (MLA): `[num_blocks, block_size_tokens, 1, D]`.

    Token-major, so that a run of neighbouring blocks reads as one `[tokens, *kv_shape]` view (see BlockManager).
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        shape = (num_blocks, block_size_tokens, *config.kv_shape)
        self.layers = [_zeros(shape, dtype, device) for _ in range(config.num_layers)]
        self.slots = [layer.view(-1, *shape[2:]) for layer in self.layers]  # [tokens, *kv_shape]

    @property
    def num_bytes(self) -> int:
        """Of the pool's tensors."""
        return sum(layer.numel() * layer.element_size() for layer in self.layers)

    def scrub(self, block_table: list[int]) -> None:
        """Zero the blocks of a request that produced NaN: attention multiplies padding by 0, and 0 * NaN is NaN."""
        index = torch.tensor(block_table, device=self.layers[0].device)
        for layer in self.layers:
            layer.index_fill_(0, index, 0.0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU from calloc, so that a page of the pool takes memory only once a request writes to it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
