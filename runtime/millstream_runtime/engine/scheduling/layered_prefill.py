"""A prompt's chunk in slices of layers, one a step, beside decodes that pass all layers in each.

    step         1               2               3
    decodes      layers 0 to 4   layers 0 to 4   layers 0 to 4    a token each, in every step
    chunk        layers 0, 1     layers 2, 3     layer 4          from here on its tokens count as computed

Behind a long context even the smallest chunk may take longer than answers should wait, and few queries read the keys
before them at a bad rate. So a chunk keeps a size that computes well, and what a step takes of it is cut along the
layers (layered prefill: Lee et al. 2025, arXiv 2510.08055, who cut whole prompts so, for the sake of experts' weights).

Nothing counts before the last layer: the tokens are not computed, the prefix cache is not offered their blocks, and
nobody else's prompt is begun. So chunks under way can be dropped at any time, and are when one of their sequences ends
or is preempted: the others are planned again. What the layers have written by then lies behind the computed tokens of
its sequence, where whoever gets the block writes before it reads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from millstream_runtime.engine.scheduling.scheduler import Chunk
from millstream_runtime.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ChunkSlice:
    """What one step computes of chunks: the layers from `first_layer` up to `end_layer`, or what is left of them."""

    chunks: list[Chunk]
    begins: bool  # whether nothing of the chunks was computed, nor given to a side thread
    first_layer: int
    end_layer: int
    num_layers: int  # of the model

    @property
    def is_last(self) -> bool:
        """Whether the chunks are computed with it."""
        return self.end_layer == self.num_layers

    @property
    def share(self) -> float:
        """Of the chunks' work."""
        return (self.end_layer - self.first_layer) / self.num_layers


class LayeredPrefill:
    """The chunks that are under way, and how far."""

    def __init__(self, num_layers: int) -> None:
        """`num_layers`: of the model."""
        self._num_layers = num_layers
        self._next_layer = 0
        self._have_begun = False
        self.chunks: list[Chunk] = []

    @property
    def sequences(self) -> Collection[Sequence]:
        """Whose chunks are under way."""
        return [chunk.sequence for chunk in self.chunks]

    def begin(self, chunks: list[Chunk], *, beside: bool) -> None:
        """From now on these are under way; `beside`: on a side thread."""
        self.chunks, self._next_layer, self._have_begun = chunks, 0, beside

    def drop(self) -> None:
        """Forget them."""
        self.chunks = []

    def next_slice(self, most_layers: int) -> ChunkSlice:
        """The next layers of the chunks, at most so many: an equal share of what is left in each of as few steps."""
        left = self._num_layers - self._next_layer
        num_steps = -(-left // most_layers)
        return self._take(-(-left // num_steps))

    def rest(self) -> ChunkSlice:
        """All layers that are left."""
        return self._take(self._num_layers - self._next_layer)

    def _take(self, num_layers: int) -> ChunkSlice:
        first, end = self._next_layer, self._next_layer + num_layers
        part = ChunkSlice(self.chunks, not self._have_begun, first, end, self._num_layers)
        self._next_layer, self._have_begun = end, True
        if part.is_last:
            self.chunks = []
        return part
