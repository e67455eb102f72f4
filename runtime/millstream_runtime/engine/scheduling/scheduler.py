"""Which sequences compute how many tokens in the next step.

There are no phases. Each step moves the computed tokens of sequences towards their known tokens, under one token
budget (vLLM V1's rule): a long prompt takes several chunks, a decode is a chunk of one token, a preempted sequence
starts again, and a prefix-cache hit starts further on.

    waiting (in order) --admit--> running (a row each) --finish--> gone
              ^--------------preempt---------------'

`schedule(state) -> plan` decides: pure, no torch, no clock, no randomness, nothing changed. `Scheduler` owns the
queues and applies the plan.

No deadlock: the pool holds at least one sequence of the greatest length, and the first running sequence in order is
never preempted, so it always ends. No starvation: the order is the arrival plus the priority's head start (see
`Sequence.order`), admission is strictly in that order, and after finitely many arrivals every newcomer comes behind.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.rows import Rows
from millstream_runtime.engine.scheduling.sequence import Sequence

# Blocks that an admission leaves free for running sequences: without them each admission soon costs a preemption.
WATERMARK_PERCENT = 1


class Chunk(NamedTuple):
    """The next `num_tokens` uncomputed tokens of one sequence."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this chunk reaches the last known token, so that a new one is sampled."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """All that a plan depends on. `running` and `waiting` are sorted by `Sequence.order`."""

    blocks: BlockManager
    running: list[Sequence]
    waiting: list[Sequence]
    num_free_rows: int
    max_num_batched_tokens: int
    max_prompt_tokens: int | None = None  # of a step that decodes share (see `pacing`); None is no bound of its own
    partial: Collection[Sequence] = ()  # prompts with a chunk of which some layers are computed (`layered_prefill`)


@dataclass(slots=True)
class StepPlan:
    """What one step computes, which sequences are admitted with which cached blocks, and which are preempted."""

    chunks: dict[Sequence, int] = field(default_factory=dict)
    admitted: dict[Sequence, list[int]] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(self.chunks.values())


def schedule(state: SchedulerState) -> StepPlan:
    """Choose the chunks of the next step: the running first, then as many of the waiting as fit, in order."""
    builder = _PlanBuilder(state)
    # Decodes come first, one token each, so that no prompt, however long, stalls an answer under way; and what prompts
    # take of a step with decodes in it is bounded, so that it does not make one wait either.
    prompts: list[Sequence] = []
    for sequence in state.running:
        if sequence.is_complete or sequence in state.partial:
            continue  # it waits until its last step is read, or its chunk is done
        if len(sequence.token_ids) - sequence.num_computed_tokens > 1:
            prompts.append(sequence)
        else:
            builder.run(sequence)
    if state.partial:
        return builder.plan  # no other prompt is begun before that chunk is done
    if builder.plan.chunks and state.max_prompt_tokens is not None:
        builder.bound_prompts(state.max_prompt_tokens)
    for sequence in prompts:
        builder.run(sequence)
    if not builder.plan.preempted:  # a preempted sequence must not return by preempting another
        for sequence in state.waiting:
            if not builder.admit(sequence):
                break  # no overtaking: the first in the queue waits for room, and gets it
    return builder.plan


class _PlanBuilder:
    """A plan in the making, and what it leaves of the budget and of the pool."""

    def __init__(self, state: SchedulerState) -> None:
        self.plan = StepPlan()
        self._state = state
        self._blocks = state.blocks
        self._tokens_left = state.max_num_batched_tokens
        self._blocks_left = state.blocks.num_free_blocks
        self._rows_left = state.num_free_rows
        self._preempted: set[Sequence] = set()
        self._released: Counter[int] = Counter()  # by block: holders that the plan preempts
        self._reused: set[int] = set()  # evictable blocks that an admission of this plan holds again

    def bound_prompts(self, max_prompt_tokens: int) -> None:
        """Let the prompts, which are all that is left to plan, take at most this many tokens together."""
        self._tokens_left = min(self._tokens_left, max_prompt_tokens)

    def run(self, sequence: Sequence) -> None:
        """Plan the next chunk of a running sequence, putting others back where the pool is short."""
        num_tokens = min(len(sequence.token_ids) - sequence.num_computed_tokens, self._tokens_left)
        if num_tokens == 0 or sequence in self._preempted:
            return
        target_tokens = sequence.num_computed_tokens + num_tokens
        if target_tokens > len(sequence.block_table) * self._blocks.block_size_tokens:
            missing = self._blocks.missing_blocks(sequence, target_tokens)
            while missing > self._blocks_left:
                victim = self._victim()
                self._preempt(victim)
                if victim is sequence:
                    return
            self._blocks_left -= missing
        self.plan.chunks[sequence] = num_tokens
        self._tokens_left -= num_tokens

    def admit(self, sequence: Sequence) -> bool:
        """Plan the first chunk of a waiting sequence; False if there is no room for it."""
        if not self._tokens_left or not self._rows_left:
            return False
        hits = self._blocks.match_prefix(sequence)
        reused = [block for block in hits if block not in self._reused and not self._blocks.is_held(block)]
        # It gets the blocks of all its known tokens at once, so that no prompt preempts itself half-way.
        fresh_blocks = self._blocks.blocks_for(len(sequence.token_ids)) - len(hits)
        spare_blocks = max(1, self._blocks.num_blocks * WATERMARK_PERCENT // 100)
        if not self._state.running and not self.plan.admitted:
            spare_blocks = 0
        if fresh_blocks + len(reused) + spare_blocks > self._blocks_left:
            return False
        num_uncomputed = len(sequence.token_ids) - len(hits) * self._blocks.block_size_tokens
        self.plan.chunks[sequence] = min(num_uncomputed, self._tokens_left)
        self.plan.admitted[sequence] = hits
        self._tokens_left -= self.plan.chunks[sequence]
        self._blocks_left -= fresh_blocks + len(reused)
        self._rows_left -= 1
        self._reused.update(reused)
        return True

    def _victim(self) -> Sequence:
        """The least urgent, then the least computed (cheapest to compute again), then the last; never the first."""
        first, *others = (one for one in self._state.running if one not in self._preempted)
        return min(others, key=lambda one: (-one.request.priority, one.num_computed_tokens, -one.order), default=first)

    def _preempt(self, victim: Sequence) -> None:
        planned_tokens = self.plan.chunks.pop(victim, 0)
        if planned_tokens:
            self._tokens_left += planned_tokens
            self._blocks_left += self._blocks.missing_blocks(victim, victim.num_computed_tokens + planned_tokens)
        self._blocks_left += self._blocks.freed_by(victim, self._released)
        self._released.update(victim.held_blocks)
        self._preempted.add(victim)
        self.plan.preempted.append(victim)


class Scheduler:
    """Continuous batching: sequences join and leave between any two steps."""

    def __init__(self, blocks: BlockManager, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self._blocks = blocks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: list[Sequence] = []  # in order
        self.running: list[Sequence] = []  # in order
        self._free_rows = Rows(max_num_seqs)
        self.num_preemptions_total = 0
        self.recomputed_tokens_total = 0
        self.queried_tokens_total = 0  # prompt tokens that were looked up in the prefix cache
        self.hit_tokens_total = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that have no row."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self.running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence in order."""
        bisect.insort(self._waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, running or waiting, and take its blocks back at once."""
        if sequence.row is None:
            del self._waiting[bisect.bisect_left(self._waiting, _order(sequence), key=_order)]
        else:
            self._release(sequence)

    def plan(self, max_prompt_tokens: int | None = None, partial: Collection[Sequence] = ()) -> StepPlan:
        """Return what the next step should be; nothing is changed.

        `max_prompt_tokens` bounds the tokens of prompts in a step that has decodes. `partial` sequences have a chunk in
        progress, which is not part of the plan.
        """
        state = SchedulerState(
            self._blocks,
            self.running,
            self._waiting,
            len(self._free_rows),
            self._max_num_batched_tokens,
            max_prompt_tokens,
            partial,
        )
        return schedule(state)

    def apply(self, plan: StepPlan, *, publish_prompts: bool = True) -> list[Chunk]:
        """Prepare a step that was planned just now: rows, blocks and cached tokens are in place when this returns.

        No sequence that it preempts has a step in flight. The caller launches every chunk and then calls `advance`,
        before it plans again. Without `publish_prompts`, chunks of several tokens may take more steps than this one:
        their blocks are not in the prefix cache before `advance`.
        """
        for sequence in plan.preempted:
            self._preempt(sequence)
        for (
            sequence,
            hits,
        ) in plan.admitted.items():  # before allocations, which may evict the cached blocks
            self._admit(sequence, hits)
        chunks = []
        block_size_tokens = self._blocks.block_size_tokens
        for sequence, num_tokens in plan.chunks.items():
            if sequence in plan.admitted:
                num_tokens = self._allocate_admitted(sequence, num_tokens)
            # One in sixteen steps of a decode needs a block and one in sixteen fills one: the others skip the calls.
            target_tokens = sequence.num_computed_tokens + num_tokens
            if target_tokens > len(sequence.block_table) * block_size_tokens:
                self._blocks.allocate(sequence, target_tokens)
            may_publish = publish_prompts or num_tokens == 1
            if target_tokens >= (sequence.num_published_blocks + 1) * block_size_tokens and may_publish:
                self._blocks.publish(sequence, target_tokens)
            chunks.append(Chunk(sequence, num_tokens))
        return chunks

    def advance(self, chunks: Iterable[Chunk]) -> None:
        """Count the chunks' tokens as computed: what the device is given from now on comes after them.

        Blocks of chunks that were applied without `publish_prompts` are published here. That comes before blocks
        outside the window are freed: no block is ever both free and cached.
        """
        for sequence, num_tokens in chunks:
            sequence.num_computed_tokens += num_tokens
            if num_tokens > 1:
                self._blocks.publish(sequence, sequence.num_computed_tokens)
            self._blocks.free_outside_window(sequence)

    def recompute(self, sequence: Sequence) -> None:
        """Free the blocks of a running sequence whose keys have all become stale (longrope); it keeps its row.

        It computes them again in new blocks, since other sequences may share the old ones.
        """
        self._blocks.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.block_hashes.clear()

    def _admit(self, sequence: Sequence, hits: list[int]) -> None:
        """Move a sequence from waiting to running, with the cached blocks that were found for it."""
        del self._waiting[bisect.bisect_left(self._waiting, _order(sequence), key=_order)]
        sequence.row = self._free_rows.allocate(self._blocks.row_of_region(hits[0]) if hits else None)
        bisect.insort(self.running, sequence, key=_order)
        self._blocks.attach_cached(sequence, hits)

    def _allocate_admitted(self, sequence: Sequence, num_tokens: int) -> int:
        """Allocate blocks for all known tokens of an admitted sequence; return how many planned tokens are left.

        Sequences admitted in the same step may have published what it needs (the choices of one prompt): those blocks
        are shared too.
        """
        self._blocks.attach_cached(sequence, self._blocks.match_prefix(sequence, start_block=len(sequence.block_table)))
        self._blocks.allocate(sequence, len(sequence.token_ids))
        hit_tokens = sequence.num_computed_tokens
        self.recomputed_tokens_total += max(0, sequence.num_lost_tokens - hit_tokens)
        if not sequence.num_lost_tokens and sequence.uses_prefix_cache:
            sequence.num_cached_tokens = hit_tokens
            self.queried_tokens_total += len(sequence.token_ids)
            self.hit_tokens_total += hit_tokens
        return min(num_tokens, sequence.num_uncomputed_tokens)

    def _preempt(self, sequence: Sequence) -> None:
        """Move a running sequence back to waiting: it keeps its tokens and loses its blocks."""
        self._release(sequence)
        sequence.num_lost_tokens = sequence.num_computed_tokens
        sequence.num_computed_tokens = 0
        self.num_preemptions_total += 1
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.row is None:
            raise ValueError(f"request {sequence.request.request_id} is not running")
        self._blocks.free(sequence)
        del self.running[bisect.bisect_left(self.running, _order(sequence), key=_order)]
        self._free_rows.release(sequence.row, is_cached=self._blocks.region_is_cached(sequence.row))
        sequence.row = None


def _order(sequence: Sequence) -> tuple[int, int]:
    """Sort key: the order, then the arrival."""
    return sequence.order, sequence.arrival
