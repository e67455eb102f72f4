"""Attention of prompt chunks over a paged pool on a CPU: the typed function of `paged_prefill`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from millstream_kernels.arguments import require
from millstream_kernels.cpu.loaded_code import LoadedCode
from millstream_kernels.cpu.pools import FORMATS, BlockTables, Integers, LayerCall, check_scales
from millstream_kernels.cpu.task import PANEL_ROWS, UNIT_ROWS, PromptField, bits_of, prompt_scratch_bytes

LEAST_UNITS_PER_THREAD = 4  # with fewer, units are made smaller, so that threads end at about the same time


class PagedPrompts:
    """Chunks of new tokens, one after another, which all layers of a step share."""

    def __init__(
        self,
        code: LoadedCode,
        tables: Sequence[Sequence[int]],
        lengths: Sequence[int],
        num_tokens: Sequence[int],
        block_size_tokens: int,
    ) -> None:
        """Args:
            tables: of each chunk its sequence's blocks, as many as its tokens fill, or more.
            lengths: tokens of each sequence in the cache, the chunk's own included, which are the last.
            num_tokens: of each chunk.

        Raises:
            KernelArgumentError: no chunks, one without tokens or longer than its sequence, a table that is too short.
        """
        self._code = code
        self._tables = BlockTables(tables, lengths, block_size_tokens)
        for own, length in zip(num_tokens, lengths, strict=True):
            require(1 <= own <= length, "num_tokens", f"has {own}, of a sequence of {length} tokens")
        self._firsts = np.array([0, *accumulate(num_tokens)], np.int64)
        self._num_tokens = np.array(num_tokens, np.int64)
        self._calls: dict[tuple[object, ...], _Call] = {}

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
        """`query` `[tokens of all chunks, KV, group, D]`; the rest, and what is returned, as `PagedDecodes.attend`."""
        layer = LayerCall(scale, window, softcap, latent_size, num_threads)
        key = (layer, query.shape, pool.shape, query.dtype, pool.dtype, pool.stride())
        if (call := self._calls.get(key)) is None:
            call = self._calls[key] = self._prepared(query, pool, layer)
        check_scales(scales, pool)
        numbers = query.contiguous().float()
        output = torch.empty(call.output_shape, dtype=torch.float32)
        # Anew for each call, so that a step whose layers differ has it once.
        scratch = torch.empty(call.num_threads * call.task[PromptField.SCRATCH_BYTES], dtype=torch.uint8)
        task, call.following[0] = call.task, 0
        task[PromptField.QUERY], task[PromptField.POOL] = numbers.data_ptr(), pool.data_ptr()
        task[PromptField.OUTPUT], task[PromptField.SCRATCH] = output.data_ptr(), scratch.data_ptr()
        task[PromptField.SCALES] = 0 if scales is None else scales.data_ptr()
        self._code.run("paged_prefill", call.address, call.num_threads)
        return output.to(query.dtype)

    def _prepared(self, query: Tensor, pool: Tensor, layer: LayerCall) -> _Call:
        """Everything of a call but where its tensors lie."""
        self._tables.check(query, pool, layer.latent_size, int(self._firsts[-1]))
        num_tokens, heads, group, dim = query.shape
        value_heads, size = (heads, dim) if layer.latent_size is None else (0, layer.latent_size)
        units = self._units(heads, group, layer)
        num_threads = min(layer.num_threads, len(units))
        scratch_bytes = prompt_scratch_bytes(dim, size, is_copied=pool.dtype is not torch.float32)
        following = np.zeros(1, np.int64)
        task = (ctypes.c_int64 * len(PromptField))()
        for field, value in (
            (PromptField.BLOCKS, self._tables.blocks.ctypes.data),
            (PromptField.STARTS, self._tables.starts.ctypes.data),
            (PromptField.LENGTHS, self._tables.lengths.ctypes.data),
            (PromptField.FIRSTS, self._firsts.ctypes.data),
            (PromptField.UNITS, units.ctypes.data),
            (PromptField.NEXT, following.ctypes.data),
            (PromptField.FORMAT, FORMATS[pool.dtype]),
            (PromptField.CHUNKS, len(self._num_tokens)),
            (PromptField.NUM_UNITS, len(units)),
            (PromptField.SCRATCH_BYTES, scratch_bytes),
            (PromptField.HEADS, heads),
            (PromptField.GROUP, group),
            (PromptField.HEAD_SIZE, dim),
            (PromptField.SLOTS, pool.shape[1]),
            (PromptField.BLOCK_SIZE, self._tables.block_size_tokens),
            (PromptField.WINDOW, layer.window or 0),
            (PromptField.SCALE, bits_of(layer.scale)),
            (PromptField.SOFTCAP, bits_of(layer.softcap or 0.0)),
            (PromptField.VALUE_HEADS, value_heads),
            (PromptField.VALUE_SIZE, size),
        ):
            task[field] = value
        shape = (num_tokens, heads, group, size)
        return _Call(task, ctypes.addressof(task), num_threads, shape, units, following)

    def _units(self, heads: int, group: int, layer: LayerCall) -> Units:
        """`[units, 4]`, those of most work first: a thread that takes one of the last is done soon."""
        rows, wanted = UNIT_ROWS, LEAST_UNITS_PER_THREAD * layer.num_threads
        while rows > PANEL_ROWS and heads * int((-(-self._num_tokens * group // rows)).sum()) < wanted:
            rows //= 2
        units, work = [], []
        for chunk, (own, length) in enumerate(zip(self._num_tokens, self._tables.lengths, strict=True)):
            first = np.arange(0, own * group, rows)
            count = np.minimum(rows, own * group - first)
            seen = length - own + (first + count) // group
            of_head = np.stack((np.full_like(first, chunk), np.zeros_like(first), first, count), axis=1)
            units.append(np.repeat(of_head, heads, axis=0))
            units[-1][:, 1] = np.tile(np.arange(heads), len(first))
            work.append(np.repeat(count * (seen if layer.window is None else np.minimum(seen, layer.window)), heads))
        order = np.argsort(-np.concatenate(work), kind="stable")
        return np.ascontiguousarray(np.concatenate(units)[order])


Units = np.ndarray[tuple[int, int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class _Call:
    """A task, and the memory that it names."""

    task: ctypes.Array[ctypes.c_int64]
    address: int
    num_threads: int
    output_shape: tuple[int, int, int, int]
    units: Units
    following: Integers
