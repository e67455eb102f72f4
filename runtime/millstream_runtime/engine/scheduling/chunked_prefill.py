"""How the chunks of prompts share the device with decodes, so that answers do not stutter. Three ways:

    whole          the chunk fits into the time that a step may take, and is part of it
    side prefill   it does not fit: it is computed next to the steps of decodes, where the device has a way to (a CPU)
    slices         it does not fit and there is no side prefill: some of its layers per step (`layered_prefill`)

Where the device does not bound prompts by time (a GPU), every chunk is whole.

A chunk that is not computed whole is partial until it has passed all layers. Until then nothing of it counts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from millstream_runtime.engine.scheduling.layered_prefill import ChunkSlice, LayeredPrefill
from millstream_runtime.engine.scheduling.pacing import Pace, StepTime, balance_tokens
from millstream_runtime.engine.scheduling.scheduler import Chunk, Scheduler, StepPlan
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.models.config.model_config import ModelConfig

# Of a chunk for the side prefill: it computes well, and the prompts of others do not wait for it long.
SIDE_PREFILL_TOKENS = 256


class SidePrefill(Protocol):
    """Computes chunks next to the steps; see `DevicePolicy.side_prefill`."""

    @property
    def is_busy(self) -> bool:
        """Whether chunks are being computed."""

    def start(self, chunks: list[Chunk]) -> None:
        """Begin to compute chunks. Those before are done or dropped."""

    def stop(self) -> None:
        """Wait until nothing is computed any more: one layer at most. Raises what the computation raised."""


class ChunkedPrefill:
    """Decides before each step what it computes of prompts, and learns from its time how much the next may."""

    def __init__(
        self,
        config: ModelConfig,
        block_size_tokens: int,
        side: SidePrefill | None = None,
        *,
        is_bounded_by_time: bool = True,
    ) -> None:
        """`side`: None where the device has no side prefill. `is_bounded_by_time`: else every chunk is whole."""
        self._is_bounded_by_time = is_bounded_by_time
        self._balance_tokens, self._num_layers, self._side = balance_tokens(config), config.num_layers, side
        self._block_size_tokens = block_size_tokens
        self._layered = LayeredPrefill(self._num_layers)
        self.reset_pace()
        self.num_side_chunks = 0
        self.num_slices = 0

    def reset_pace(self) -> None:
        """Forget the times of the steps so far."""
        self.pace = Pace(self._balance_tokens, self._num_layers)

    def close(self) -> None:
        """End the side prefill."""
        if self._side is not None:
            self._side.stop()

    @property
    def partial(self) -> Collection[Sequence]:
        """Sequences whose chunks have passed some layers: an argument of `Scheduler.plan`."""
        return self._layered.sequences

    def most_tokens(self, context_tokens: int) -> int | None:
        """Tokens of prompts in the next step if it has decodes: an argument of `Scheduler.plan`; None is no bound."""
        most_tokens = self.pace.most_tokens(context_tokens)
        if most_tokens is None or self._side is None:
            return most_tokens
        return max(most_tokens, SIDE_PREFILL_TOKENS)

    def apply(self, plan: StepPlan, scheduler: Scheduler) -> tuple[list[Chunk], ChunkSlice | None]:
        """Apply the plan to the scheduler. Returns what the step computes: whole chunks, and some layers of others."""
        for victim in plan.preempted:
            self.drop(victim)
        is_too_much = self._is_too_much(plan)
        chunks = scheduler.apply(plan, publish_prompts=not is_too_much)
        if is_too_much:
            self._begin([chunk for chunk in chunks if chunk.num_tokens > 1])
            chunks = [chunk for chunk in chunks if chunk.num_tokens == 1]
        return chunks, self._next_slice(has_decodes=bool(chunks))

    def drop(self, sequence: Sequence) -> None:
        """Forget the partial chunks if one is of `sequence`, which has ended or is preempted: when this returns,
        nothing writes to its blocks."""
        if sequence in self.partial:
            self.close()
            self._layered.drop()

    def step_time(self, chunks: list[Chunk], layer_slice: ChunkSlice | None) -> StepTime | None:
        """What a step is about to compute, its seconds still 0; None where its time says or bounds nothing."""
        if not self._is_bounded_by_time:
            return None
        if self._side is not None and (layer_slice is not None or self.partial):
            return None
        work = sum(self._work(chunk) for chunk in chunks if chunk.num_tokens > 1)
        if layer_slice is not None:
            work += layer_slice.layer_fraction * sum(self._work(chunk) for chunk in layer_slice.chunks)
        return StepTime(sum(chunk.num_tokens == 1 for chunk in chunks), work, seconds=0.0)

    def _is_too_much(self, plan: StepPlan) -> bool:
        """Whether the prompts of a plan make its decodes wait too long."""
        prompts = [(one, num_tokens) for one, num_tokens in plan.chunks.items() if num_tokens > 1]
        if not prompts or len(prompts) == len(plan.chunks):
            return False
        work = 0.0
        for sequence, num_tokens in prompts:
            hit_tokens = len(plan.admitted.get(sequence, ())) * self._block_size_tokens
            work += self.pace.work(num_tokens, sequence.num_computed_tokens + hit_tokens)
        return self.pace.layers(work) < self._num_layers

    def _begin(self, chunks: list[Chunk]) -> None:
        self._layered.begin(chunks, is_started=self._side is not None)
        if chunks and self._side is not None:
            self._side.start(chunks)
            self.num_side_chunks += len(chunks)

    def _next_slice(self, *, has_decodes: bool) -> ChunkSlice | None:
        """What the next step computes of the partial chunks: all that is left where no decode waits for it."""
        if not self.partial:
            return None
        if self._side is not None:
            if has_decodes and self._side.is_busy:
                return None
            self._side.stop()
            return self._layered.rest()
        self.num_slices += 1
        if not has_decodes:
            return self._layered.rest()
        return self._layered.next_slice(self.pace.layers(sum(self._work(chunk) for chunk in self._layered.chunks)))

    def _work(self, chunk: Chunk) -> float:
        return self.pace.work(chunk.num_tokens, chunk.sequence.num_computed_tokens)
