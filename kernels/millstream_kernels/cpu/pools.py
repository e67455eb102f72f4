"""What attention of decodes and of prompts on a CPU is given: a paged pool, block tables, the rules of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError, require, require_tensor
from millstream_kernels.cpu.task import Format

Integers = np.ndarray[tuple[int], np.dtype[np.int64]]
FORMATS = {
    torch.float32: Format.FLOAT32,
    torch.bfloat16: Format.BFLOAT16,
    torch.float16: Format.FLOAT16,
    torch.int8: Format.INT8,
    torch.uint8: Format.FP8,
}
DTYPES = {torch.float32, torch.bfloat16, torch.float16}  # of queries


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What the calls of a step's layers may differ in; see `PagedDecodes.attend`."""

    scale: float
    window: int | None
    softcap: float | None
    latent_size: int | None
    num_threads: int


class BlockTables:
    """The block tables of a step's rows or chunks, one after another."""

    def __init__(self, tables: Sequence[Sequence[int]], lengths: Sequence[int], block_size_tokens: int) -> None:
        """Raises KernelArgumentError: no lengths, one below 1, or a table that is too short."""
        require(bool(lengths) and min(lengths) >= 1, "lengths", f"are {[*lengths]}; each is a number of tokens above 0")
        widths = [-(-length // block_size_tokens) for length in lengths]
        self.block_size_tokens = block_size_tokens
        self.lengths = np.array(lengths, np.int64)
        self.starts = np.array([0, *accumulate(widths)][:-1], np.int64)
        self.blocks = np.concatenate([_as_array(table[:width]) for table, width in zip(tables, widths, strict=True)])
        found, wanted = len(self.blocks), sum(widths)
        require(found == wanted, "tables", f"have {found} blocks, and the tokens of their rows fill {wanted}")
        least = int(self.blocks.min())
        require(least >= 0, "tables", f"name the block {least}; blocks are numbered from 0")
        self._end_slot = (int(self.blocks.max()) + 1) * block_size_tokens

    def check(self, query: Tensor, pool: Tensor, latent_size: int | None, num_rows: int) -> None:
        """Raise KernelArgumentError unless the kernels take `query` `[num_rows, KV, group, D]` and the pool."""
        require_tensor("query", query, (num_rows, None, None, None), DTYPES, is_aligned=False)
        heads, dim = query.shape[1], query.shape[3]
        pool_heads = 2 * heads if latent_size is None else heads
        require_tensor("pool", pool, (pool_heads, None, dim), {*FORMATS}, is_aligned=False)
        fits = latent_size is None or 1 <= latent_size <= dim
        require(fits, "latent_size", f"is {latent_size}; a key has {dim} numbers")
        for name, tensor in (("query", query), ("pool", pool)):
            require(tensor.device.type == "cpu", name, f"is on {tensor.device}; the kernel reads a CPU's memory")
        require(pool.is_contiguous(), "pool", "is not contiguous")
        require(self._end_slot <= pool.shape[1], "tables", f"name a slot beyond the pool's {pool.shape[1]}")


def check_scales(scales: Tensor | None, pool: Tensor) -> None:
    """Raise KernelArgumentError unless they are what the format of the pool needs."""
    if pool.dtype in DTYPES:
        require(scales is None, "scales", f"are given, and the pool is {str(pool.dtype).removeprefix('torch.')}")
        return
    heads, slots, _ = pool.shape
    shape, dtype = ((heads, slots), torch.float16) if pool.dtype is torch.int8 else ((heads,), torch.float32)
    if scales is None:
        raise KernelArgumentError("scales", f"are missing, and the pool is {str(pool.dtype).removeprefix('torch.')}")
    require_tensor("scales", scales, shape, {dtype}, is_aligned=False)
    require(scales.is_contiguous() and scales.device.type == "cpu", "scales", "are not contiguous in a CPU's memory")


def _as_array(blocks: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """A range has as many numbers as a context has tokens, where blocks are slots: made at once, not one by one."""
    if isinstance(blocks, range):
        return np.arange(blocks.start, blocks.stop, blocks.step, dtype=np.int32)
    return np.array(blocks, np.int32)
