"""Attention of decodes over a paged pool on a CPU: the typed function of `paged_decode`."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from millstream_kernels.cpu import code_folder
from millstream_kernels.cpu.loaded_code import LoadedCode
from millstream_kernels.cpu.pools import FORMATS, BlockTables, Integers, LayerCall, check_scales
from millstream_kernels.cpu.task import NUM_FIELDS, Field, bits_of, decode_scratch_numbers

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
        self._code, self.num_rows = code, len(lengths)
        self._tables = BlockTables(tables, lengths, block_size_tokens)
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
        layer = LayerCall(scale, window, softcap, latent_size, num_threads)
        key = (layer, query.shape, pool.shape, query.dtype, pool.dtype, pool.stride())
        if (call := self._calls.get(key)) is None:
            call = self._calls[key] = self._prepared(query, pool, layer)
        check_scales(scales, pool)
        numbers = query.contiguous().float()
        output = torch.empty(call.output_shape, dtype=torch.float32)
        task = call.task
        task[Field.QUERY], task[Field.POOL], task[Field.OUTPUT] = numbers.data_ptr(), pool.data_ptr(), output.data_ptr()
        task[Field.SCRATCH] = _SCRATCH.address(call.scratch_numbers)
        task[Field.SCALES] = 0 if scales is None else scales.data_ptr()
        self._code.run("paged_decode", call.address, call.num_parts)
        return output.to(query.dtype)

    def _prepared(self, query: Tensor, pool: Tensor, layer: LayerCall) -> _Call:
        """Everything of a call but where its tensors lie."""
        self._tables.check(query, pool, layer.latent_size, self.num_rows)
        rows, heads, queries, dim = query.shape
        value_heads, size = (heads, dim) if layer.latent_size is None else (0, layer.latent_size)
        # Where rows are few, threads share the queries of a head in equal parts, as far as there are such.
        groups = heads * math.gcd(queries, -(-layer.num_threads // (rows * heads)))
        group = heads * queries // groups
        num_parts = max(1, min(layer.num_threads, rows * groups))
        width = int(self._seen(layer.window).max())
        part_numbers = decode_scratch_numbers(group, width, dim, self._tables.block_size_tokens)
        cuts = self._cut(groups, num_parts, layer.window)
        task = (ctypes.c_int64 * NUM_FIELDS)()
        for field, value in (
            (Field.BLOCKS, self._tables.blocks.ctypes.data),
            (Field.STARTS, self._tables.starts.ctypes.data),
            (Field.LENGTHS, self._tables.lengths.ctypes.data),
            (Field.CUTS, cuts.ctypes.data),
            (Field.FORMAT, FORMATS[pool.dtype]),
            (Field.ROWS, rows),
            (Field.GROUPS, groups),
            (Field.GROUP, group),
            (Field.HEAD_SIZE, dim),
            (Field.SLOTS, pool.shape[1]),
            (Field.BLOCK_SIZE, self._tables.block_size_tokens),
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
        shape = (rows, heads, queries, size)
        return _Call(task, ctypes.addressof(task), num_parts, shape, num_parts * part_numbers, cuts)

    def _seen(self, window: int | None) -> Integers:
        """Tokens that each row sees: `[rows]`."""
        lengths = self._tables.lengths
        return lengths if window is None else np.minimum(lengths, window)

    def _cut(self, groups: int, num_parts: int, window: int | None) -> Integers:
        """First units of parts that read about as many tokens, and the end: `[parts + 1]`."""
        ends = np.cumsum(np.tile(self._seen(window), groups))
        wanted = ends[-1] * np.arange(1, num_parts) / num_parts
        return np.array([0, *(np.searchsorted(ends, wanted) + 1), len(ends)], np.int64)


class _Scratch(threading.local):
    """What all calls of a thread share, whatever plans, groups and kinds of layers its steps have: as much as the
    largest has needed. A new tensor for each call would take a tenth of the time of a short one."""

    def __init__(self) -> None:
        self._numbers, self._count, self._address = torch.empty(0), 0, 0

    def address(self, count: int) -> int:
        """Of at least `count` float32."""
        if self._count < count:
            self._numbers, self._count = torch.empty(0), 0  # before there are two
            self._numbers = torch.empty(count, dtype=torch.float32)
            self._count, self._address = count, self._numbers.data_ptr()
        return self._address


_SCRATCH = _Scratch()


@dataclass(frozen=True, slots=True)
class _Call:
    """A task, and the memory that it names."""

    task: ctypes.Array[ctypes.c_int64]
    address: int
    num_parts: int
    output_shape: tuple[int, int, int, int]
    scratch_numbers: int
    cuts: Integers
