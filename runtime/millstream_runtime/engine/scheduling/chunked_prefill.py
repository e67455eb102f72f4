"""How prompts share the machine with answers under way, so that these do not stutter. Three ways:

    whole         the chunk fits into the time that a step may take, and is part of it
    side thread   it does not fit: it passes its layers beside the steps of decodes, on cores of its own (a CPU)
    slices        it does not fit and there is no side thread: some of its layers a step (`layered_prefill`)

A chunk that is not computed whole is under way until it has passed all layers. Until then nothing of it counts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from millstream_runtime.engine.scheduling.layered_prefill import ChunkSlice, LayeredPrefill
from millstream_runtime.engine.scheduling.pacing import Pace, StepTime, balance_tokens
from millstream_runtime.engine.scheduling.scheduler import Chunk, Scheduler, StepPlan
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.models.config.model_config import ModelConfig

# Of a chunk for the side thread: it computes well, and the prompts of others do not wait for it long.
SIDE_THREAD_TOKENS = 256


class SidePrefill(Protocol):
    """What can compute chunks beside the steps; see `Forward.start_side_prefill`."""

    @property
    def computes_beside(self) -> bool: ...
    @property
    def is_busy_beside(self) -> bool: ...
    def start_side_prefill(self, chunks: list[Chunk]) -> None: ...
    def stop_beside(self) -> None: ...


class PromptShare:
    """Decides before each step what it computes of prompts, and learns from it how much the next may."""

    def __init__(self, config: ModelConfig, block_size_tokens: int, beside: SidePrefill) -> None:
        self._balance_tokens, self._num_layers, self._beside = balance_tokens(config), config.num_layers, beside
        self._block_size_tokens = block_size_tokens
        self._layered = LayeredPrefill(self._num_layers)
        self.forget_times()
        self.num_chunks_beside = 0
        self.num_slices = 0

    def forget_times(self) -> None:
        """What was learned so far does not hold any more."""
        self.pace = Pace(self._balance_tokens, self._num_layers)

    @property
    def under_way(self) -> Collection[Sequence]:
        """Whose chunks are under way: an argument of the plan."""
        return self._layered.sequences

    def most_tokens(self, context_tokens: int) -> int | None:
        """That prompts may have of the next step if decodes share it: an argument of the plan. See `Pace`."""
        most_tokens = self.pace.most_tokens(context_tokens)
        if most_tokens is None or not self._beside.computes_beside:
            return most_tokens
        return max(most_tokens, SIDE_THREAD_TOKENS)

    def apply(self, plan: StepPlan, scheduler: Scheduler) -> tuple[list[Chunk], ChunkSlice | None]:
        """Have the scheduler prepare the plan. What the step computes: chunks in whole, and some layers of others."""
        for victim in plan.preempted:
            self.drop(victim)
        is_too_much = self._is_too_much(plan)
        chunks = scheduler.apply(plan, prompts_later=is_too_much)
        if is_too_much:
            self._begin([chunk for chunk in chunks if chunk.num_tokens > 1])
            chunks = [chunk for chunk in chunks if chunk.num_tokens == 1]
        return chunks, self._next_slice(beside_decodes=bool(chunks))

    def drop(self, sequence: Sequence) -> None:
        """Forget the chunks under way if one is of `sequence`, which has ended or gives up its blocks: when this
        returns, nobody writes to them."""
        if sequence in self.under_way:
            self._beside.stop_beside()
            self._layered.drop()

    def time_of(self, chunks: list[Chunk], part: ChunkSlice | None) -> StepTime | None:
        """Of a step that is to be launched, its seconds still 0; None where they will tell nothing."""
        if self._beside.computes_beside and (part is not None or self.under_way):
            return None
        work = sum(self._work(chunk) for chunk in chunks if chunk.num_tokens > 1)
        if part is not None:
            work += part.share * sum(self._work(chunk) for chunk in part.chunks)
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
        beside = self._beside.computes_beside
        self._layered.begin(chunks, beside=beside)
        if chunks and beside:
            self._beside.start_side_prefill(chunks)
            self.num_chunks_beside += len(chunks)

    def _next_slice(self, *, beside_decodes: bool) -> ChunkSlice | None:
        """What the next step computes of the chunks under way: all that is left where no decode waits for it."""
        if not self.under_way:
            return None
        if self._beside.computes_beside:
            if beside_decodes and self._beside.is_busy_beside:
                return None
            self._beside.stop_beside()
            return self._layered.rest()
        self.num_slices += 1
        if not beside_decodes:
            return self._layered.rest()
        return self._layered.next_slice(self.pace.layers(sum(self._work(chunk) for chunk in self._layered.chunks)))

    def _work(self, chunk: Chunk) -> float:
        return self.pace.work(chunk.num_tokens, chunk.sequence.num_computed_tokens)
