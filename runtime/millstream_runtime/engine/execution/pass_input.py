"""What a model is given of a step: from plain data to tensors, and the plan of attention over a KV pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from millstream_runtime.draft_tree import depths
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.grouped_attention import GroupedAttention
from millstream_runtime.engine.attention.no_queries import NoQueries
from millstream_runtime.engine.attention.paged_attention import TorchAttention
from millstream_runtime.engine.attention.prefill import KeptMasks
from millstream_runtime.engine.attention.within_window import WithinWindow
from millstream_runtime.engine.device_policy import DevicePolicy
from millstream_runtime.engine.execution.step_input import ChunkInput
from millstream_runtime.engine.kernel_backends import Backend
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.layers.attention import Attention, ReadRows


class StepTensors(NamedTuple):
    """What a model is given of a step. Token ids, positions and, of its last group of layers, slots: `[T]` int64."""

    token_ids: Tensor
    positions: Tensor
    attention: Attention
    slots: Tensor
    read: ReadRows | None = None  # None: all rows


class PassInput:
    """Makes the tensors of steps over a KV pool."""

    def __init__(
        self,
        cache: KVCache,
        policy: DevicePolicy,
        backend: Backend = Backend.TORCH,
        longest_window: int | None = None,
    ) -> None:
        """See `Forward`."""
        self._cache, self._policy, self._backend = cache, policy, backend
        self._device = cache.heads[0].device
        self._longest_window = longest_window

    def of(self, token_ids: list[int], chunks: Sequence[ChunkInput], rows: list[int] | None = None) -> StepTensors:
        """The tokens of all chunks, one after another. `rows`: those that chunks name as read; None: all."""
        positions: list[int] = []
        for chunk in chunks:
            positions += _rotary_rows(chunk)
        num_groups = self._cache.layout.num_groups
        by_group = [[chunk.of_group(group) for chunk in chunks] for group in range(num_groups)]
        slots = [_slots(group, self._cache.block_size_tokens) for group in by_group]
        inputs = on_device([token_ids, positions, *slots], self._device)
        kept = KeptMasks()
        attentions = self._attentions(
            inputs[2:], [[_attention_chunk(chunk) for chunk in group] for group in by_group], kept
        )
        if len(attentions) == 1:
            attention = self._within_window(attentions[0])
        else:
            attention = GroupedAttention(attentions, self._cache.layout.group_of)
        read = None
        if rows is not None:
            last = self._cache.layout.group_of[-1]
            of_rows = self._attention_of_rows(inputs[2 + last], by_group[last], kept)
            read = ReadRows(on_device(rows, self._device, torch.int64), self._within_window(of_rows))
        return StepTensors(inputs[0], inputs[1], attention, inputs[-1], read)

    def _within_window(self, attention: Attention) -> Attention:
        return attention if self._longest_window is None else WithinWindow(attention, self._longest_window)

    def _attention_of_rows(self, slots: Tensor, chunks: list[ChunkInput], kept: KeptMasks) -> Attention:
        """That of the last layer, for the queries of the rows that are read. A prompt's last row is as a decode."""
        own = [one for one in map(_read_chunk, chunks) if one.num_tokens]
        if not own:
            return NoQueries(self._cache, slots)
        return self._attentions(slots.unsqueeze(0), [own], kept.of_other_rows())[0]

    def _attentions(self, slots: Tensor, by_group: list[list[AttentionChunk]], kept: KeptMasks) -> list[Attention]:
        """The plan of each group of layers."""
        is_torch_on_cpu = self._device.type == "cpu" and self._backend is not Backend.TRITON
        if not is_torch_on_cpu and any(chunk.parents for group in by_group for chunk in group):
            raise RuntimeError("a tree of drafts is attended to by torch on a CPU alone")
        if self._backend is Backend.TRITON:
            from millstream_runtime.engine.attention.triton_attention import TritonAttention

            return [TritonAttention(self._cache, own, group) for own, group in zip(slots, by_group, strict=True)]
        kv_read = self._policy.kv_read()
        return [
            TorchAttention(self._cache, own, group, kv_read, kept, self._policy.compiled_code)
            for own, group in zip(slots, by_group, strict=True)
        ]


def _attention_chunk(chunk: ChunkInput) -> AttentionChunk:
    return AttentionChunk(
        chunk.num_tokens, chunk.context_len, chunk.block_table, chunk.is_contiguous, chunk.num_drafts, chunk.parents
    )


def _read_chunk(chunk: ChunkInput) -> AttentionChunk:
    """The queries of the chunk's rows that are read: its last tokens."""
    num_read = chunk.num_tokens - chunk.num_unread_rows
    return replace(_attention_chunk(chunk), num_tokens=num_read, num_drafts=min(chunk.num_drafts, max(0, num_read - 1)))


def _rotary_rows(chunk: ChunkInput) -> Iterable[int]:
    """Of all new tokens. A draft of a tree has the position that it would have as a known token: its depth decides."""
    first = chunk.context_len - chunk.num_tokens + chunk.rotary_offset
    if not chunk.parents:
        return range(first, first + chunk.num_tokens)
    last_known = first + chunk.num_tokens - chunk.num_drafts - 1
    return [*range(first, last_known + 1), *(last_known + depth for depth in depths(chunk.parents))]


def _slots(chunks: Sequence[ChunkInput], block_size_tokens: int) -> list[int]:
    """Slots in the pool of all new tokens."""
    slots: list[int] = []
    for chunk in chunks:
        slots += _slot_mapping(chunk, block_size_tokens)
    return slots


def _slot_mapping(chunk: ChunkInput, block_size_tokens: int) -> Sequence[int]:
    """Slots in the pool of the chunk's new tokens."""
    start, stop = chunk.context_len - chunk.num_tokens, chunk.context_len
    blocks = chunk.scattered_blocks
    if blocks is None:
        first_slot = chunk.first_block * block_size_tokens
        return range(first_slot + start, first_slot + stop)
    return [
        blocks[position // block_size_tokens] * block_size_tokens + position % block_size_tokens
        for position in range(start, stop)
    ]
