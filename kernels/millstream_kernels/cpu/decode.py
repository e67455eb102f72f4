"""Attention of decodes over a paged pool on a CPU: the typed function of `paged_decode`."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from millstream_kernels.arguments import KernelArgumentError, require, require_tensor
from millstream_kernels.cpu import code_folder
from millstream_kernels.cpu.loaded_code import LoadedCode
from millstream_kernels.cpu.task import NUM_FIELDS, Field, Format, bits_of

Integers = np.ndarray[tuple[int], np.dtype[np.int64]]
FORMATS = {
    torch.float32: Format.FLOAT32,
    torch.bfloat16: Format.BFLOAT16,
    torch.float16: Format.FLOAT16,
    torch.int8: Format.INT8,
    torch.uint8: Format.FP8,
}
DTYPES = {torch.float32, torch.bfloat16, torch.float16}  # of queries
FOLDER_VARIABLE = "MILLSTREAM_CPU_KERNELS_DIR"


@functools.cache
def load() -> LoadedCode:
    """The machine code, once a process.

    Raises:
        CodeError: it cannot be used on this machine; the message says why.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    return LoadedCode(code_folder.read(Path(folder) if folder else code_folder.FOLDER))


class PagedDecodes:
    """Rows with one query each, which all layers of a step share."""

    def __init__(
        self, code: LoadedCode, tables: Sequence[Sequence[int]], lengths: Sequence[int], block_size_tokens: int
    ) -> None:
        """Args:
            tables: of each row its blocks, as many as its tokens fill, or more.
            lengths: tokens in the cache, the row's own included; at least 1.

        Raises:
            KernelArgumentError: no rows, a row without tokens, or a table that is too short.
        """
        require(bool(lengths) and min(lengths) >= 1, "lengths", "have no row, or one without tokens")
        self._code, self.num_rows = code, len(lengths)
        self._lengths = np.array(lengths, np.int64)
        widths = [-(-length // block_size_tokens) for length in lengths]
        self._starts = np.array([0, *accumulate(widths)][:-1], np.int64)
        self._blocks = np.concatenate([_as_array(table[:width]) for table, width in zip(tables, widths, strict=True)])
        require(len(self._blocks) == sum(widths), "tables", "have fewer blocks than the tokens of their rows fill")
        require(int(self._blocks.min()) >= 0, "tables", "name a block below 0")
        self._end_slot = (int(self._blocks.max()) + 1) * block_size_tokens
        self._block_size_tokens = block_size_tokens
        self._calls: dict[tuple[object, ...], _Call] = {}
        self._tokens_read: dict[int | None, int] = {}

    def tokens_read(self, window: int | None) -> int:
        """By all rows together."""
        if window not in self._tokens_read:
            self._tokens_read[window] = int(self._seen(window).sum())
        return self._tokens_read[window]

    def attend(
        self,
        query: Tensor,
        pool: Tensor,
        scales: Tensor | None = None,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        latent_size: int | None = None,
        num_threads: int = 1,
    ) -> Tensor:
        """`query` `[rows, KV, group, D]`, of DTYPES, over `pool` `[2 * KV, slots, D]`; returns what query is like.

        All sums are in float32. Not by two threads at a time: the layers of a step follow one another.

        Args:
            pool: float32, bfloat16, float16; int8; or uint8, the bits of float8_e4m3fn.
            scales: of int8, float16 `[2 * KV, slots]`; of uint8, float32 `[2 * KV]`; of others None.
            scale: on query times key.
            window: tokens that a row sees at most, itself included; None: all.
            softcap: scores become softcap * tanh(scores / softcap).
            latent_size: the first numbers of a key that are the value too (MLA). The pool is then `[KV, slots, D]`, and
                what is returned `[rows, KV, group, latent_size]`.
            num_threads: of torch's; the result is the same with any number.

        Raises:
            KernelArgumentError: a dtype, a shape or a layout that the kernel does not take; names the argument.
        """
        layer = _Layer(scale, window, softcap, latent_size, num_threads)
        key = (layer, query.shape, pool.shape, query.dtype, pool.dtype, pool.stride())
        if (call := self._calls.get(key)) is None:
            call = self._calls[key] = self._prepared(query, pool, layer)
        _check_scales(scales, pool)
        numbers = query.contiguous().float()
        output = torch.empty(call.output_shape, dtype=torch.float32)
        task = call.task
        task[Field.QUERY], task[Field.POOL], task[Field.OUTPUT] = numbers.data_ptr(), pool.data_ptr(), output.data_ptr()
        task[Field.SCALES] = 0 if scales is None else scales.data_ptr()
        self._code.run("paged_decode", call.address, call.num_parts)
        return output.to(query.dtype)

    def _prepared(self, query: Tensor, pool: Tensor, layer: _Layer) -> _Call:
        """Everything of a call but where its tensors lie."""
        self._check(query, pool, layer.latent_size)
        rows, heads, queries, dim = query.shape
        value_heads, size = (heads, dim) if layer.latent_size is None else (0, layer.latent_size)
        # Where rows are few, threads share the queries of a head in equal parts, as far as there are such.
        groups = heads * math.gcd(queries, -(-layer.num_threads // (rows * heads)))
        group = heads * queries // groups
        num_parts = max(1, min(layer.num_threads, rows * groups))
        width = int(self._seen(layer.window).max())
        scratch_size = num_parts * (group * (width + 2 * dim) + self._block_size_tokens * dim)
        scratch = torch.empty(scratch_size, dtype=torch.float32)
        cuts = self._cut(groups, num_parts, layer.window)
        task = (ctypes.c_int64 * NUM_FIELDS)()
        for field, value in (
            (Field.BLOCKS, self._blocks.ctypes.data),
            (Field.STARTS, self._starts.ctypes.data),
            (Field.LENGTHS, self._lengths.ctypes.data),
            (Field.CUTS, cuts.ctypes.data),
            (Field.SCRATCH, scratch.data_ptr()),
            (Field.FORMAT, FORMATS[pool.dtype]),
            (Field.ROWS, rows),
            (Field.GROUPS, groups),
            (Field.GROUP, group),
            (Field.HEAD_SIZE, dim),
            (Field.SLOTS, pool.shape[1]),
            (Field.BLOCK_SIZE, self._block_size_tokens),
            (Field.WINDOW, layer.window or 0),
            (Field.SCORES, width),
            (Field.PARTS, num_parts),
            (Field.SCALE, bits_of(layer.scale)),
            (Field.SOFTCAP, bits_of(layer.softcap or 0.0)),
            (Field.KEY_HEADS, heads),
            (Field.VALUE_HEADS, value_heads),
            (Field.VALUE_SIZE, size),
        ):
            task[field] = value
        return _Call(task, ctypes.addressof(task), num_parts, (rows, heads, queries, size), scratch, cuts)

    def _seen(self, window: int | None) -> Integers:
        """Tokens that each row sees: `[rows]`."""
        return self._lengths if window is None else np.minimum(self._lengths, window)

    def _cut(self, groups: int, num_parts: int, window: int | None) -> Integers:
        """First units of parts that read about as many tokens, and the end: `[parts + 1]`."""
        ends = np.cumsum(np.tile(self._seen(window), groups))
        wanted = ends[-1] * np.arange(1, num_parts) / num_parts
        return np.array([0, *(np.searchsorted(ends, wanted) + 1), len(ends)], np.int64)

    def _check(self, query: Tensor, pool: Tensor, latent_size: int | None) -> None:
        require_tensor("query", query, (self.num_rows, None, None, None), DTYPES, is_aligned=False)
        heads, dim = query.shape[1], query.shape[3]
        pool_heads = 2 * heads if latent_size is None else heads
        require_tensor("pool", pool, (pool_heads, None, dim), {*FORMATS}, is_aligned=False)
        fits = latent_size is None or 1 <= latent_size <= dim
        require(fits, "latent_size", f"is {latent_size}; a key has {dim} numbers")
        for name, tensor in (("query", query), ("pool", pool)):
            require(tensor.device.type == "cpu", name, f"is on {tensor.device}; the kernel reads a CPU's memory")
        require(pool.is_contiguous(), "pool", "is not contiguous")
        require(self._end_slot <= pool.shape[1], "tables", f"name a slot beyond the pool's {pool.shape[1]}")


def _as_array(blocks: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """A range has as many numbers as a context has tokens, where blocks are slots: made at once, not one by one."""
    if isinstance(blocks, range):
        return np.arange(blocks.start, blocks.stop, blocks.step, dtype=np.int32)
    return np.array(blocks, np.int32)


def _check_scales(scales: Tensor | None, pool: Tensor) -> None:
    if pool.dtype in DTYPES:
        require(scales is None, "scales", f"are given, and the pool is {str(pool.dtype).removeprefix('torch.')}")
        return
    heads, slots, _ = pool.shape
    shape, dtype = ((heads, slots), torch.float16) if pool.dtype is torch.int8 else ((heads,), torch.float32)
    if scales is None:
        raise KernelArgumentError("scales", f"are missing, and the pool is {str(pool.dtype).removeprefix('torch.')}")
    require_tensor("scales", scales, shape, {dtype}, is_aligned=False)
    require(scales.is_contiguous() and scales.device.type == "cpu", "scales", "are not contiguous in a CPU's memory")


@dataclass(frozen=True, slots=True)
class _Layer:
    """What layers may differ in; see `PagedDecodes.attend`."""

    scale: float
    window: int | None
    softcap: float | None
    latent_size: int | None
    num_threads: int


@dataclass(frozen=True, slots=True)
class _Call:
    """A task, and the memory that it names."""

    task: ctypes.Array[ctypes.c_int64]
    address: int
    num_parts: int
    output_shape: tuple[int, int, int, int]
    scratch: Tensor
    cuts: Integers
