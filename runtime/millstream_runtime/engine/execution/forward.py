"""The model's pass over one step: the part that every rank computes alike. Rank 0 alone samples from it.

step.chunks        -> all layers   -> residual rows
step.layer_slice   -> some layers  -> kept for the next slice; residual rows after the last layer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from millstream_runtime.engine.attention import varlen_attention
from millstream_runtime.engine.attention.paged_attention import AttentionChunk, KVRead, TorchAttention
from millstream_runtime.engine.device_policy import DevicePolicy
from millstream_runtime.engine.execution.graphs import FillTokens, GraphedDecodes, leave_tokens
from millstream_runtime.engine.execution.step_input import ChunkInput, LayerSlice, StepInput
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.layers.decoder import Decoder


class LayerwiseForward:
    """Chunks that pass the layers in several calls: the keys and values of the first layers are in the pool."""

    def __init__(self, model: Decoder, token_ids: Tensor, positions: Tensor, attention: TorchAttention) -> None:
        """`token_ids`, `positions`: `[T]` int64, of all chunks."""
        self._model = model
        self.residual, self._step = model.begin(token_ids, positions, attention)  # [T, hidden]
        self.num_done_layers = 0

    def advance(self, end_layer: int) -> bool:
        """Compute the layers up to `end_layer`. Returns whether the last one is done."""
        self._model.pass_layers(self.residual, self._step, self.num_done_layers, end_layer)
        self.num_done_layers = end_layer
        return end_layer == self._model.config.num_layers


def do_nothing() -> None:
    """Return at once."""


class Forward:
    """A model (or a rank's share) and its KV pool."""

    def __init__(
        self, model: Decoder, cache: KVCache, policy: DevicePolicy, graphs: GraphedDecodes | None = None
    ) -> None:
        """`graphs`: serves what steps of decodes it can."""
        self.model = model
        self._cache = cache
        self._policy = policy
        self.device = cache.heads[0].device
        self.reads_in_place = varlen_attention.can_serve(model.config, cache.heads[0])
        self.graphs = graphs
        self._layerwise: LayerwiseForward | None = None

    def residual(
        self, step: StepInput, fill: FillTokens = leave_tokens, before_slice: Callable[[], None] = do_nothing
    ) -> Tensor:
        """Return the last layer's residual stream of all tokens that are done, `[T, hidden]`; the next step may
        overwrite it.

        `fill` puts the tokens that only the device knows into those of the step's chunks, `[T]` there. `before_slice`
        is called between the chunks and the slice, where there are both.
        """
        done = [self._whole(step, fill)] if step.chunks else []
        if step.layer_slice is not None:
            if done:
                before_slice()
            done += self._slice(step.layer_slice)
        return done[0] if len(done) == 1 else torch.cat(done)

    def begin_layers(
        self, token_ids: list[int], chunks: Sequence[ChunkInput], kv_read: KVRead | None
    ) -> LayerwiseForward:
        """Begin a pass over chunks, which takes the place of any that is not finished.

        The next slice of layers goes on from wherever the pass is then.
        """
        self._layerwise = LayerwiseForward(self.model, *self._inputs(token_ids, chunks, kv_read))
        return self._layerwise

    def _whole(self, step: StepInput, fill: FillTokens) -> Tensor:
        """`[T, hidden]` of the step's chunks."""
        if self.graphs is not None and (replayed := self.graphs.residual(step, fill)) is not None:
            return replayed
        token_ids, positions, attention = self._inputs(step.token_ids, step.chunks, self._policy.kv_read())
        fill(token_ids)
        return self.model.forward(token_ids, positions, attention)

    def _slice(self, layers: LayerSlice) -> list[Tensor]:
        """The rows of the slice's chunks, `[T, hidden]`, if they have passed the last layer; before that nothing."""
        if layers.chunks:
            self.begin_layers(layers.token_ids, layers.chunks, self._policy.kv_read())
        layerwise = self._layerwise
        if layerwise is None:
            raise ValueError("a slice of layers continues chunks that were never begun")
        if not layerwise.advance(layers.end_layer):
            return []
        self._layerwise = None
        return [layerwise.residual]

    def _inputs(
        self, token_ids: list[int], chunks: Sequence[ChunkInput], kv_read: KVRead | None
    ) -> tuple[Tensor, Tensor, TorchAttention]:
        """Token ids and positions, both `[T]` int64, and the plan of attention."""
        positions: list[int] = []
        slots: list[int] = []
        for chunk in chunks:
            start = chunk.context_len - chunk.num_tokens
            rotary_row = start + chunk.rotary_offset
            positions += range(rotary_row, rotary_row + chunk.num_tokens)
            slots += _slot_mapping(chunk, self._cache.block_size_tokens)
        inputs = on_device([token_ids, positions, slots], self.device)
        chunk_plans = [_attention_chunk(chunk) for chunk in chunks]
        attention = TorchAttention(self._cache, inputs[2], chunk_plans, kv_read)
        return inputs[0], inputs[1], attention

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
    return AttentionChunk(chunk.num_tokens, chunk.context_len, chunk.block_table, chunk.is_contiguous)


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
