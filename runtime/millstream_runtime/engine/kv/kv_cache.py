"""The KV pool: one tensor per layer, cut into blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millstream_runtime.engine.transfer import on_device
from millstream_runtime.kv_layout import KVLayout, one_group
from millstream_runtime.models.config.model_config import ModelConfig


class KVCache:
    """`heads[i]` of a layer: `[2 * KV, num_blocks * block_size_tokens, D]`, the heads of the keys, then of the values.

    Where all heads share one latent key that is the value too (MLA): one head.

    Head-major, so that attention reads the tokens of a head one after another, in order, at the speed of memory: with
    the heads of a token side by side it took 1.4 to 1.7 times as long on a CPU. A run of neighbouring blocks reads as
    one view `[2 * KV, tokens, D]` (see BlockManager).

    `layers[i]` is the same by blocks: `[num_blocks, block_size_tokens, 2 * KV, D]`, a strided view.

    Layers of different groups share tensors, in which they have different blocks: see `kv_layout`.

    Behind the blocks of requests there may be two for padding, which no request ever gets: see `static_decode`.
    """

    PADDING_BLOCKS = 2

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        layout: KVLayout | None = None,
        num_padding_blocks: int = 0,
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
    ) -> None:
        """`layout`: by default one group of all layers. `zeros(shape, dtype)`: allocates a tensor; `torch.zeros` on
        `device` by default."""
        self.layout = layout if layout is not None else one_group(config.num_layers, None)
        self.num_blocks = num_blocks
        self.num_padding_blocks = num_padding_blocks
        self.block_size_tokens = block_size_tokens
        num_heads, head_dim = config.kv_shape
        num_all_blocks = num_blocks + num_padding_blocks
        shape = (num_heads, num_all_blocks * block_size_tokens, head_dim)
        tensors = [
            torch.zeros(shape, dtype=dtype, device=device) if zeros is None else zeros(shape, dtype)
            for _ in range(self.layout.layers_per_group)
        ]
        by_block = (num_heads, num_all_blocks, block_size_tokens, head_dim)
        self._by_block = [heads.view(by_block).permute(1, 2, 0, 3) for heads in tensors]
        self.heads = [tensors[place] for place in self.layout.place_of]
        self.layers = [self._by_block[place] for place in self.layout.place_of]

    @property
    def sink_block(self) -> int:
        """The block that padded rows write. Nothing reads it."""
        return self.num_blocks

    @property
    def zero_block(self) -> int:
        """The block that is read in place of blocks beyond a request's own. Nothing writes it."""
        return self.num_blocks + 1

    @property
    def num_bytes(self) -> int:
        """Of the pool's tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._by_block)

    def zero_blocks(self, block_table: list[int]) -> None:
        """Zero the blocks of a request that produced NaN: attention multiplies padding by 0, and 0 * NaN is NaN."""
        index = on_device(block_table, self.heads[0].device)
        for tensor in self._by_block:
            tensor.index_fill_(0, index, 0.0)
