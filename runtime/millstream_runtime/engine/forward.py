"""The model's pass over one step: the part that every rank does alike. What is sampled from it is rank 0's business."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millstream_runtime.engine.attention import AttentionChunk, TorchAttention
from millstream_runtime.engine.graphs import FillTokens, GraphedDecodes, leave_tokens
from millstream_runtime.engine.kv_cache import KVCache
from millstream_runtime.engine.step_input import ChunkInput, StepInput
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.decoder import Decoder


class Forward:
    """A model (or a rank's share) and its KV pool."""

    def __init__(
        self, model: Decoder, cache: KVCache, device: torch.device, graphs: GraphedDecodes | None = None
    ) -> None:
        """`graphs`: serves what steps of decodes it can."""
        self.model = model
        self._cache = cache
        self.device = device
        self.graphs = graphs

    def residual(self, step: StepInput, fill: FillTokens = leave_tokens) -> Tensor:
        """The last layer's residual stream of all tokens, `[T, hidden]`; it may be gone with the next step's.

        `fill` puts the tokens that only the device knows into the step's, `[T]` there.
        """
        if self.graphs is not None and (replayed := self.graphs.residual(step, fill)) is not None:
            return replayed
        positions: list[int] = []
        slots: list[int] = []
        for chunk in step.chunks:
            start = chunk.context_len - chunk.num_tokens
            rotary_row = start + chunk.rotary_offset
            positions += range(rotary_row, rotary_row + chunk.num_tokens)
            slots += _slots(chunk, self._cache.block_size_tokens)
        inputs = on_device([step.token_ids, positions, slots], self.device)
        fill(inputs[0])
        attention = TorchAttention(self._cache, inputs[2], [_attention_chunk(chunk) for chunk in step.chunks])
        return self.model.forward(inputs[0], inputs[1], attention)

    def logits(self, residual: Tensor, rows: Sequence[int]) -> Tensor:
        """`[len(rows), vocab]` of some rows, ascending; on ranks beyond 0 none."""
        first, count = rows[0], len(rows)
        if rows[-1] - first + 1 == count:
            return self.model.logits(residual[first : first + count])
        return self.model.logits(residual[on_device(rows, self.device)])

    def scrub(self, blocks: list[int]) -> None:
        """Zero KV blocks, before anyone else is given them."""
        self._cache.scrub(blocks)


def _attention_chunk(chunk: ChunkInput) -> AttentionChunk:
    return AttentionChunk(chunk.num_tokens, chunk.context_len, chunk.block_table, chunk.is_contiguous)


def _slots(chunk: ChunkInput, block_size_tokens: int) -> Sequence[int]:
    """Places in the pool of the chunk's new tokens."""
    start, stop = chunk.context_len - chunk.num_tokens, chunk.context_len
    blocks = chunk.scattered_blocks
    if blocks is None:
        home = chunk.first_block * block_size_tokens
        return range(home + start, home + stop)
    return [
        blocks[position // block_size_tokens] * block_size_tokens + position % block_size_tokens
        for position in range(start, stop)
    ]
