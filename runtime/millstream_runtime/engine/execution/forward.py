"""The model's pass over one step: the part that every rank does alike. What is sampled from it is rank 0's business.

step.chunks        -> all layers   -> residual rows
step.layer_slice   -> some layers  -> kept for the next slice; residual rows after the last layer

Chunks under way may also pass their layers on a side thread, between the slice that begins them and the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millstream_runtime.engine.attention import varlen_attention
from millstream_runtime.engine.attention.paged_attention import AttentionChunk, TorchAttention
from millstream_runtime.engine.cpu.side_thread import SideThread
from millstream_runtime.engine.execution.graphs import FillTokens, GraphedDecodes, leave_tokens
from millstream_runtime.engine.execution.step_input import ChunkInput, LayerSlice, StepInput
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.layers.attention import Step
from millstream_runtime.models.layers.decoder import Decoder


@dataclass(slots=True)
class _UnderWay:
    """Chunks between two slices of layers: keys and values of the first `num_layers` are in the pool."""

    residual: Tensor
    step: Step
    num_layers: int = 0


def nothing() -> None:
    """Do so."""


class Forward:
    """A model (or a rank's share) and its KV pool."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        device: torch.device,
        graphs: GraphedDecodes | None = None,
        side: SideThread | None = None,
    ) -> None:
        """`graphs`: serves what steps of decodes it can. `side`: for `start_side_prefill`."""
        self.model = model
        self._cache = cache
        self.device = device
        self.reads_in_place = varlen_attention.can_serve(model.config, cache.heads[0])
        self.graphs = graphs
        self.side = side
        self._all_threads = torch.get_num_threads()
        self._under_way: _UnderWay | None = None

    def residual(
        self, step: StepInput, fill: FillTokens = leave_tokens, before_slice: Callable[[], None] = nothing
    ) -> Tensor:
        """The last layer's residual stream of all tokens that are done, `[T, hidden]`; it may be gone with the next
        step's.

        `fill` puts the tokens that only the device knows into those of the step's chunks, `[T]` there. `before_slice`
        is called between the chunks and the slice, where there are both.
        """
        done = [self._whole(step, fill)] if step.chunks else []
        if step.layer_slice is not None:
            if done:
                before_slice()
            done += self._slice(step.layer_slice)
        return done[0] if len(done) == 1 else torch.cat(done)

    def start_side_prefill(self, token_ids: list[int], chunks: Sequence[ChunkInput]) -> None:
        """Have chunks pass their layers on the side thread. They take the place of any that were under way.

        A slice of layers goes on from wherever they are when `stop_beside` has returned.
        """
        if self.side is None:
            raise ValueError("there is no side thread")
        num_layers = self.model.config.num_layers
        chunk = _UnderWay(*self.model.begin(*self._inputs(token_ids, chunks, self.side.num_threads)))
        self._under_way = chunk

        def pass_layer() -> bool:
            self.model.pass_layers(chunk.residual, chunk.step, chunk.num_layers, chunk.num_layers + 1)
            chunk.num_layers += 1
            return chunk.num_layers < num_layers

        self.side.start(pass_layer)  # after which nothing else touches `chunk` until `stop_beside`

    @property
    def is_busy_beside(self) -> bool:
        """Whether the side thread computes."""
        return self.side is not None and self.side.is_busy

    def stop_beside(self) -> None:
        """Wait until the side thread has left the KV pool alone: for one layer at most."""
        if self.side is not None:
            self.side.stop()

    @property
    def num_threads(self) -> int:
        """Threads of a CPU for the next step, as many as the side thread leaves."""
        if self.side is None or not self.side.is_busy:
            return self._all_threads
        return max(1, self._all_threads - self.side.num_threads)

    def _whole(self, step: StepInput, fill: FillTokens) -> Tensor:
        """`[T, hidden]` of the step's chunks."""
        if self.graphs is not None and (replayed := self.graphs.residual(step, fill)) is not None:
            return replayed
        token_ids, positions, attention = self._inputs(step.token_ids, step.chunks, self.num_threads)
        fill(token_ids)
        return self.model.forward(token_ids, positions, attention)

    def _slice(self, layers: LayerSlice) -> list[Tensor]:
        """The rows of the slice's chunks, `[T, hidden]`, once they have passed the last layer; before that nothing.

        One that begins takes the place of any that was under way and will not be finished.
        """
        if layers.chunks:
            inputs = self._inputs(layers.token_ids, layers.chunks, self.num_threads)
            self._under_way = _UnderWay(*self.model.begin(*inputs))
        chunk = self._under_way
        if chunk is None:
            raise ValueError("a slice of layers goes on with chunks that were never begun")
        self.model.pass_layers(chunk.residual, chunk.step, chunk.num_layers, layers.end_layer)
        chunk.num_layers = layers.end_layer
        if chunk.num_layers < self.model.config.num_layers:
            return []
        self._under_way = None
        return [chunk.residual]

    def _inputs(
        self, token_ids: list[int], chunks: Sequence[ChunkInput], num_threads: int
    ) -> tuple[Tensor, Tensor, TorchAttention]:
        """Token ids and positions, both `[T]`, and the plan of attention with at most so many threads."""
        positions: list[int] = []
        slots: list[int] = []
        for chunk in chunks:
            start = chunk.context_len - chunk.num_tokens
            rotary_row = start + chunk.rotary_offset
            positions += range(rotary_row, rotary_row + chunk.num_tokens)
            slots += _slots(chunk, self._cache.block_size_tokens)
        inputs = on_device([token_ids, positions, slots], self.device)
        chunk_plans = [_attention_chunk(chunk) for chunk in chunks]
        attention = TorchAttention(self._cache, inputs[2], chunk_plans, num_threads)
        return inputs[0], inputs[1], attention

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
