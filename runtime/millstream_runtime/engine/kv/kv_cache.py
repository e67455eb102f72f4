"""The KV pool: one tensor per layer, cut into blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from millstream_runtime.config import KVCacheDType
from millstream_runtime.engine.kv.layer_pool import Fp8Pool, Int8Pool, LayerPool, NarrowPool, PlainPool
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.kv_formats import dequantizing_bytes
from millstream_runtime.kv_layout import KVLayout, one_group
from millstream_runtime.models.config.model_config import ModelConfig

_CODE_DTYPES = {KVCacheDType.INT8: torch.int8, KVCacheDType.FP8: torch.uint8}


class KVCache:
    """`heads[i]` of a layer: `[2 * KV, num_blocks * block_size_tokens, D]`, the heads of the keys, then of the values.

    Where all heads share one latent key that is the value too (MLA): one head.

    Head-major, so that attention reads the tokens of a head one after another, in order, at the speed of memory: with
    the heads of a token side by side it took 1.4 to 1.7 times as long on a CPU. A run of neighbouring blocks reads as
    one view `[2 * KV, tokens, D]` (see BlockManager).

    `layers[i]` is the same by blocks: `[num_blocks, block_size_tokens, 2 * KV, D]`, a strided view.

    Where keys and values are quantized, these are their codes, and `layer` reads and writes numbers (`layer_pool`).
    `like` has no elements: its dtype is that of the numbers, its device that of the pool.

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
        stored: KVCacheDType = KVCacheDType.AUTO,
        plain_dtype: torch.dtype | None = None,
        fp8_scales: Sequence[tuple[float, float]] = (),
    ) -> None:
        """Allocate the pool, zeroed.

        Args:
            dtype: of the model's arithmetic.
            layout: by default one group of all layers.
            zeros: `zeros(shape, dtype)` allocates a tensor; `torch.zeros` on `device` by default.
            stored: how numbers are stored; AUTO: in `plain_dtype`, which is `dtype` by default.
            fp8_scales: of keys and of values, by layer; () is 1 for all.
        """
        self.layout = layout if layout is not None else one_group(config.num_layers, None)
        self.num_blocks = num_blocks
        self.num_padding_blocks = num_padding_blocks
        self.block_size_tokens = block_size_tokens
        self.stored = stored
        self.like = torch.empty(0, dtype=dtype, device=device)
        num_heads, head_dim = config.kv_shape
        num_slots = (num_blocks + num_padding_blocks) * block_size_tokens

        def allocate(of: torch.dtype, *sizes: int) -> list[Tensor]:
            shape = (num_heads, num_slots, *sizes)
            tensors = range(self.layout.layers_per_group)
            return [torch.zeros(shape, dtype=of, device=device) if zeros is None else zeros(shape, of) for _ in tensors]

        heads = allocate(_CODE_DTYPES.get(stored, plain_dtype or dtype), head_dim)
        scales = allocate(torch.float16) if stored is KVCacheDType.INT8 else []
        self._stored = [*heads, *scales]
        self._by_block = [_by_block(tensor, block_size_tokens) for tensor in self._stored]
        self.heads = [heads[place] for place in self.layout.place_of]
        self.layers = [self._by_block[place] for place in self.layout.place_of]
        self._int8_scales = [scales[place] for place in self.layout.place_of] if scales else []
        self._fp8_scales = [_per_head(one, num_heads, self.like) for one in fp8_scales]
        self._ones = torch.ones(num_heads, device=device) if stored is KVCacheDType.FP8 else None

    def layer(self, layer: int) -> LayerPool:
        """Where a layer's keys and values are written and read."""
        heads, dtype = self.heads[layer], self.like.dtype
        if self.stored is KVCacheDType.INT8:
            return Int8Pool(heads, self._int8_scales[layer], dtype)
        if self.stored is KVCacheDType.FP8:
            return Fp8Pool(heads, dtype, self._fp8_scales[layer] if self._fp8_scales else None, self._ones)
        return PlainPool(heads) if heads.dtype is dtype else NarrowPool(heads, dtype)

    @property
    def is_in_place(self) -> bool:
        """Whether numbers can be read where they are stored."""
        return self.heads[0].dtype is self.like.dtype

    @property
    def token_bytes(self) -> int:
        """What attention reads of one token in one layer, in the model's arithmetic."""
        return self.heads[0].shape[0] * self.heads[0].shape[2] * self.like.element_size()

    @property
    def copied_token_bytes(self) -> int:
        """What a copy of one token in one layer takes while it is made: the numbers, and what they are made of."""
        heads, _, head_dim = self.heads[0].shape
        more_bytes = dequantizing_bytes(self.stored.method, heads, head_dim, self.like.element_size())
        if self.stored is KVCacheDType.AUTO and not self.is_in_place:
            more_bytes = heads * head_dim * self.heads[0].element_size()
        return self.token_bytes + more_bytes

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
            tensor.index_fill_(0, index, 0)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy what is stored in slots, in all layers. `sources`, `targets`: int64 `[n]`; they may overlap."""
        for tensor in self._stored:
            tensor.index_copy_(1, targets, tensor.index_select(1, sources))


def _by_block(tensor: Tensor, block_size_tokens: int) -> Tensor:
    """`[heads, slots, ..]` to `[blocks, block_size_tokens, heads, ..]`: a view."""
    heads, slots, *sizes = tensor.shape
    return tensor.view(heads, slots // block_size_tokens, block_size_tokens, *sizes).movedim(0, 2)


def _per_head(scales: tuple[float, float], num_heads: int, like: Tensor) -> Tensor | None:
    """Scales of keys and of values as `[heads, 1, 1]`; of a latent that of keys. None: both are 1."""
    if scales == (1.0, 1.0):
        return None
    wide = torch.promote_types(like.dtype, torch.float32)
    of_keys, of_values = (like.new_full((-(-num_heads // 2), 1, 1), scale, dtype=wide) for scale in scales)
    return torch.cat((of_keys, of_values))[:num_heads]
