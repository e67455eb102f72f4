"""The KV pool: one tensor a layer, cut into blocks."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.config.model_config import ModelConfig


class KVCache:
    """`heads[i]` of a layer: `[2 * KV, num_blocks * block_size_tokens, D]`, the heads of the keys, then of the values.

    Where all heads share one latent key that is the value too (MLA): one head.

    Head-major, so that attention reads the tokens of a head one after another, in order, at the speed of memory: with
    the heads of a token side by side it took 1.4 to 1.7 times as long on a CPU. A run of neighbouring blocks reads as
    one view `[2 * KV, tokens, D]` (see BlockManager).

    `layers[i]` is the same by blocks: `[num_blocks, block_size_tokens, 2 * KV, D]`, a strided view.

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
        num_padding_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_padding_blocks = num_padding_blocks
        self.block_size_tokens = block_size_tokens
        num_heads, head_dim = config.kv_shape
        num_all_blocks = num_blocks + num_padding_blocks
        shape = (num_heads, num_all_blocks * block_size_tokens, head_dim)
        self.heads = [_zeros(shape, dtype, device) for _ in range(config.num_layers)]
        by_block = (num_heads, num_all_blocks, block_size_tokens, head_dim)
        self.layers = [heads.view(by_block).permute(1, 2, 0, 3) for heads in self.heads]

    @property
    def sink_block(self) -> int:
        """Where padded rows write. Nobody reads it."""
        return self.num_blocks

    @property
    def zero_block(self) -> int:
        """What reads beyond a request's blocks read. Nobody writes it."""
        return self.num_blocks + 1

    @property
    def num_bytes(self) -> int:
        """Of the pool's tensors."""
        return sum(layer.numel() * layer.element_size() for layer in self.layers)

    def scrub(self, block_table: list[int]) -> None:
        """Zero the blocks of a request that produced NaN: attention multiplies padding by 0, and 0 * NaN is NaN."""
        index = on_device(block_table, self.heads[0].device)
        for layer in self.layers:
            layer.index_fill_(0, index, 0.0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU from the kernel's own, so that a page of the pool takes memory only once a request writes to it.

    Small pages, whatever the machine's rule: with huge ones (numpy asks for them) the first token of a head in a row's
    home would zero and keep 2 MiB. 16 short prompts took 1.1 GB and, on a busy machine, seconds.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)  # which keeps the pages
