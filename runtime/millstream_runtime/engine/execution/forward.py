"""The model's pass over one step: the part that every rank computes alike. Rank 0 alone samples from it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from millstream_runtime.engine.attention import varlen_attention
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.grouped_attention import GroupedAttention
from millstream_runtime.engine.attention.paged_attention import TorchAttention
from millstream_runtime.engine.attention.prefill import KeptMasks
from millstream_runtime.engine.attention.within_window import WithinWindow
from millstream_runtime.engine.device_policy import DevicePolicy
from millstream_runtime.engine.execution.graphs import FillTokens, GraphedDecodes, leave_tokens
from millstream_runtime.engine.execution.step_input import ChunkInput, StepInput
from millstream_runtime.engine.kernel_backends import Backend
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.layers.attention import Attention
from millstream_runtime.models.layers.decoder import Decoder


class Forward:
    """A model (or a rank's share) and its KV pool."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        policy: DevicePolicy,
        graphs: GraphedDecodes | None = None,
        backend: Backend = Backend.TORCH,
        longest_window: int | None = None,
    ) -> None:
        """`graphs`: serves what steps of decodes it can. `backend`: what computes the attention of the other steps.
        `longest_window`: no layer reads further back, whatever its own window is; None: no bound."""
        self.model = model
        self._cache = cache
        self._policy = policy
        self._backend = backend
        self.device = cache.heads[0].device
        self.reads_in_place = varlen_attention.can_serve(model.config, cache.heads[0])
        self.graphs = graphs
        self.longest_window = longest_window

    @property
    def num_groups(self) -> int:
        """Groups of layers that have a block table each."""
        return self._cache.layout.num_groups

    def residual(self, step: StepInput, fill: FillTokens = leave_tokens) -> Tensor:
        """Return the last layer's residual stream of all tokens, `[T, hidden]`; the next step may overwrite it.

        `fill` puts the tokens that only the device knows into those of the step's chunks, `[T]` there.
        """
        if self.graphs is not None and (replayed := self.graphs.residual(step, fill)) is not None:
            return replayed
        token_ids, positions, attention = self._inputs(step.token_ids, step.chunks)
        fill(token_ids)
        return self.model.forward(token_ids, positions, attention)

    def compute_first_layers(self, token_ids: list[int], chunks: Sequence[ChunkInput], num_layers: int) -> None:
        """Compute the first layers of a step alone, to measure what they take."""
        self.model.forward(*self._inputs(token_ids, chunks), num_layers)

    def _inputs(self, token_ids: list[int], chunks: Sequence[ChunkInput]) -> tuple[Tensor, Tensor, Attention]:
        """Token ids and positions, both `[T]` int64, and the plan of attention."""
        positions: list[int] = []
        for chunk in chunks:
            rotary_row = chunk.context_len - chunk.num_tokens + chunk.rotary_offset
            positions += range(rotary_row, rotary_row + chunk.num_tokens)
        by_group = [[chunk.of_group(group) for chunk in chunks] for group in range(self.num_groups)]
        slots = [_slots(group, self._cache.block_size_tokens) for group in by_group]
        inputs = on_device([token_ids, positions, *slots], self.device)
        attentions = self._attentions(inputs[2:], [[_attention_chunk(chunk) for chunk in group] for group in by_group])
        if len(attentions) == 1:
            attention = attentions[0]
            if self.longest_window is not None:
                attention = WithinWindow(attention, self.longest_window)
            return inputs[0], inputs[1], attention
        return inputs[0], inputs[1], GroupedAttention(attentions, self._cache.layout.group_of)

    def _attentions(self, slots: Tensor, by_group: list[list[AttentionChunk]]) -> list[Attention]:
        """The plan of each group of layers."""
        if self._backend is Backend.TRITON:
            from millstream_runtime.engine.attention.triton_attention import TritonAttention

            return [TritonAttention(self._cache, own, group) for own, group in zip(slots, by_group, strict=True)]
        kv_read, kept = self._policy.kv_read(), KeptMasks()
        return [
            TorchAttention(self._cache, own, group, kv_read, kept) for own, group in zip(slots, by_group, strict=True)
        ]

    def logits(self, residual: Tensor, rows: Sequence[int]) -> Tensor:
        """`[len(rows), vocab]` of some rows, ascending; on ranks beyond 0 none."""
        first, count = rows[0], len(rows)
        if rows[-1] - first + 1 == count:
            return self.model.logits(residual[first : first + count])
        return self.model.logits(residual[on_device(rows, self.device)])

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zero KV blocks, before another request gets them."""
        self._cache.zero_blocks(blocks)


def _attention_chunk(chunk: ChunkInput) -> AttentionChunk:
    return AttentionChunk(chunk.num_tokens, chunk.context_len, chunk.block_table, chunk.is_contiguous, chunk.num_drafts)


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
