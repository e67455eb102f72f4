"""Keys and values of one layer in the pool: written and read as numbers of the model's arithmetic, however stored.

    write   numbers ─► stored, at once: attention never sees a number of this step that was not stored
    read    stored ─► numbers: a view where they are stored as they are, else a dequantized copy

So a token's keys and values are the same numbers for its own step, for later ones and for whoever shares its block.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

FP8_LIMIT = torch.finfo(torch.float8_e4m3fn).max  # 448
INT8_LIMIT = 127


class LayerPool(Protocol):
    """`[heads, slots, D]` of one layer. `block_size_tokens` slots of a head, from a block's first on, are a run."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads of keys and values (1: a latent), slots, numbers of a head."""

    @property
    def in_place(self) -> Tensor:
        """The numbers where they are stored. Raises RuntimeError: they are quantized."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """What is stored, and its scales; see `models.loading.layer_kernels.PoolPlace`."""

    def write(self, slots: Tensor, key_value: Tensor) -> None:
        """Store `key_value` `[T, heads, D]` at `slots` `[T]`, int64."""

    def between(self, first_slot: int, end_slot: int) -> Tensor:
        """Neighbouring slots, `[heads, end - first, D]`: a view or a copy."""

    def runs(self, places: Tensor, block_size_tokens: int) -> Tensor:
        """A copy of runs, `[n, block_size_tokens * D]`. `places`: int64 `[n]`, head * blocks + block."""


class PlainPool:
    """Numbers as the model computes them."""

    def __init__(self, heads: Tensor) -> None:
        self.in_place = heads

    @property
    def shape(self) -> tuple[int, int, int]:
        heads, slots, head_dim = self.in_place.shape
        return heads, slots, head_dim

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        return self.in_place, None

    def write(self, slots: Tensor, key_value: Tensor) -> None:
        self.in_place.index_copy_(1, slots, key_value.transpose(0, 1))

    def between(self, first_slot: int, end_slot: int) -> Tensor:
        return self.in_place[:, first_slot:end_slot]

    def runs(self, places: Tensor, block_size_tokens: int) -> Tensor:
        return self.in_place.view(-1, block_size_tokens * self.in_place.shape[2]).index_select(0, places)


class NarrowPool:
    """Numbers in fewer bits than the model computes with: rounded once, when they are stored."""

    def __init__(self, heads: Tensor, dtype: torch.dtype) -> None:
        """`dtype`: of the numbers that are read."""
        self._heads = heads
        self._dtype = dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        heads, slots, head_dim = self._heads.shape
        return heads, slots, head_dim

    @property
    def in_place(self) -> Tensor:
        raise RuntimeError("a KV cache of fewer bits has no numbers to read in place")

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        return self._heads, None

    def write(self, slots: Tensor, key_value: Tensor) -> None:
        self._heads.index_copy_(1, slots, key_value.transpose(0, 1).to(self._heads.dtype))

    def between(self, first_slot: int, end_slot: int) -> Tensor:
        return self._heads[:, first_slot:end_slot].to(self._dtype)

    def runs(self, places: Tensor, block_size_tokens: int) -> Tensor:
        runs = self._heads.view(-1, block_size_tokens * self._heads.shape[2]).index_select(0, places)
        return runs.to(self._dtype)


class _QuantizedPool:
    """Codes of one byte, `[heads, slots, D]`."""

    def __init__(self, codes: Tensor, dtype: torch.dtype) -> None:
        """`dtype`: of the numbers that are read. They are scaled in float32 at least, and rounded to it once."""
        self._codes = codes
        self._dtype = dtype
        self._wide = torch.promote_types(dtype, torch.float32)

    @property
    def shape(self) -> tuple[int, int, int]:
        heads, slots, head_dim = self._codes.shape
        return heads, slots, head_dim

    @property
    def in_place(self) -> Tensor:
        raise RuntimeError("a quantized KV cache has no numbers to read in place")

    def _runs_of_codes(self, places: Tensor, block_size_tokens: int) -> Tensor:
        """`[n, block_size_tokens, D]`."""
        head_dim = self._codes.shape[2]
        runs = self._codes.view(-1, block_size_tokens * head_dim).index_select(0, places)
        return runs.view(-1, block_size_tokens, head_dim)


class Int8Pool(_QuantizedPool):
    """Symmetric integers with one scale per token and head: `number = code * scale`.

    A NaN or an infinity makes the scale one, and with it every number of its token and head.
    """

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        """`codes`: int8. `scales`: float16 `[heads, slots]`."""
        super().__init__(codes, dtype)
        self._scales = scales

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        return self._codes, self._scales

    def write(self, slots: Tensor, key_value: Tensor) -> None:
        numbers = key_value.transpose(0, 1).to(self._wide)
        scales = (numbers.abs().amax(dim=-1) / INT8_LIMIT).to(self._scales.dtype)
        # By the scale as it is stored. Where it is 0, the numbers are less than a float16 can be: their codes are 0.
        wide = scales.to(numbers.dtype).unsqueeze(-1)
        codes = (numbers / wide.masked_fill(wide == 0, torch.inf)).round_().clamp_(-INT8_LIMIT, INT8_LIMIT)
        # NaN is no integer; its scale is NaN or infinite, so what its code is does not count.
        self._codes.index_copy_(1, slots, codes.nan_to_num_(nan=1.0).to(torch.int8))
        self._scales.index_copy_(1, slots, scales)

    def between(self, first_slot: int, end_slot: int) -> Tensor:
        return self._numbers(self._codes[:, first_slot:end_slot], self._scales[:, first_slot:end_slot])

    def runs(self, places: Tensor, block_size_tokens: int) -> Tensor:
        scales = self._scales.view(-1, block_size_tokens).index_select(0, places)
        return self._numbers(self._runs_of_codes(places, block_size_tokens), scales).flatten(1)

    def _numbers(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.to(self._wide).mul_(scales.to(self._wide).unsqueeze(-1)).to(self._dtype)


class Fp8Pool(_QuantizedPool):
    """float8_e4m3 with static scales: `number = code * scale`. What lies beyond its range becomes its largest number.

    An infinity is stored as NaN, since the format has none.
    """

    def __init__(
        self, codes: Tensor, dtype: torch.dtype, scales: Tensor | None = None, ones: Tensor | None = None
    ) -> None:
        """`codes`: uint8, the bits of float8_e4m3fn. `scales`: `[heads, 1, 1]`, float32; None: all are 1. `ones`:
        float32 `[heads]`, for kernels, which multiply by scales in any case; by default made anew."""
        super().__init__(codes, dtype)
        self._scales = scales
        self._ones = ones

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        if self._scales is not None:
            return self._codes, self._scales.flatten()
        ones = self._ones if self._ones is not None else torch.ones(len(self._codes), device=self._codes.device)
        return self._codes, ones

    def write(self, slots: Tensor, key_value: Tensor) -> None:
        numbers = key_value.transpose(0, 1).to(self._wide)
        if self._scales is not None:
            numbers = numbers / self._scales
        bounded = numbers.clamp(-FP8_LIMIT, FP8_LIMIT).masked_fill_(numbers.isinf(), torch.nan)
        self._codes.index_copy_(1, slots, bounded.to(torch.float8_e4m3fn).view(torch.uint8))

    def between(self, first_slot: int, end_slot: int) -> Tensor:
        return self._numbers(self._codes[:, first_slot:end_slot], self._scales)

    def runs(self, places: Tensor, block_size_tokens: int) -> Tensor:
        scales = self._scales
        if scales is not None:
            num_blocks = self._codes.shape[1] // block_size_tokens
            scales = scales.index_select(0, places.div(num_blocks, rounding_mode="floor"))
        return self._numbers(self._runs_of_codes(places, block_size_tokens), scales).flatten(1)

    def _numbers(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        numbers = codes.view(torch.float8_e4m3fn).to(self._wide)
        return (numbers if scales is None else numbers.mul_(scales)).to(self._dtype)
