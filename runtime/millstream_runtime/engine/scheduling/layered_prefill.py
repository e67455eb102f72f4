"""A prompt's chunk in slices of layers, one per step, next to decodes that pass all layers in each.

    step         1               2               3
    decodes      layers 0 to 4   layers 0 to 4   layers 0 to 4    a token each, in every step
    chunk        layers 0, 1     layers 2, 3     layer 4          from here on its tokens count as computed

Behind a long context even the smallest chunk may take longer than answers should wait, and a few queries read the keys
before them at a bad rate. So a chunk keeps a size that computes well, and a step computes some of its layers (layered
prefill: Lee et al. 2025, arXiv 2510.08055, who cut whole prompts this way to read the weights of experts less often).

Nothing counts before the last layer: the tokens are not computed, their blocks are not published to the prefix cache,
and no other prompt is begun. So partial chunks can be dropped at any time. They are dropped when one of their sequences
ends or is preempted, and the others are planned again. What the layers have written by then lies behind the computed
tokens of its sequence, where the next owner of the block writes before it reads.
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
    is_first: bool  # whether nothing of the chunks was computed, nor given to the side prefill
    first_layer: int
    end_layer: int
    num_layers: int  # of the model

    @property
    def is_last(self) -> bool:
        """Whether the chunks are computed with it."""
        return self.end_layer == self.num_layers

    @property
    def layer_fraction(self) -> float:
        """Layers of this slice among all layers of the model."""
        return (self.end_layer - self.first_layer) / self.num_layers


class LayeredPrefill:
    """The partial chunks, and how many layers they have passed."""

    def __init__(self, num_layers: int) -> None:
        """`num_layers`: of the model."""
        self._num_layers = num_layers
        self._next_layer = 0
        self._is_started = False
        self.chunks: list[Chunk] = []

    @property
    def sequences(self) -> Collection[Sequence]:
        """Sequences of the partial chunks."""
        return [chunk.sequence for chunk in self.chunks]

    def begin(self, chunks: list[Chunk], *, is_started: bool) -> None:
        """Replace the partial chunks; `is_started`: the side prefill computes them already."""
        self.chunks, self._next_layer, self._is_started = chunks, 0, is_started

    def drop(self) -> None:
        """Forget the partial chunks."""
        self.chunks = []

    def next_slice(self, most_layers: int) -> ChunkSlice:
        """Return the next layers, at most `most_layers`: the rest divided evenly among as few steps as possible."""
        left = self._num_layers - self._next_layer
        num_steps = -(-left // most_layers)
        return self._take(-(-left // num_steps))

    def rest(self) -> ChunkSlice:
        """Return all layers that are left."""
        return self._take(self._num_layers - self._next_layer)

    def _take(self, num_layers: int) -> ChunkSlice:
        first, end = self._next_layer, self._next_layer + num_layers
        layer_slice = ChunkSlice(self.chunks, not self._is_started, first, end, self._num_layers)
        self._next_layer, self._is_started = end, True
        if layer_slice.is_last:
            self.chunks = []
        return layer_slice
