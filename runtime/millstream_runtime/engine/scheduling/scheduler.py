"""Which sequences compute how many tokens in the next step.

There are no phases. Each step moves the computed tokens of sequences towards their known tokens, under one token
budget (vLLM V1's rule): a long prompt takes several chunks, a decode is a chunk of one token, a preempted sequence
starts again, and a prefix-cache hit starts further on.

    waiting (in order) --admit--> running (a row each) --finish--> gone
              ^--------------preempt---------------'

`schedule(state) -> plan` decides: pure, no torch, no clock, no randomness, nothing changed. `Scheduler` owns the
queues and applies the plan.

No deadlock: the pool holds at least one sequence of the greatest length, and the first running sequence in order is
never preempted, so it always ends. No starvation: the order is the arrival plus the priority's head start and a bounded
delay of long prompts (see `waiting_order`), room in the pool is given in that order, `prompt_budget` divides each step
so that long and short prompts do not block each other, and after finitely many arrivals every newcomer comes behind.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.prompt_budget import PromptBudget, PromptNeed, StepLoad, divide
from millstream_runtime.engine.scheduling.rows import Rows
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.scheduling.waiting_order import queue_order

# Blocks that an admission leaves free for running sequences: without them each admission soon costs a preemption.
WATERMARK_PERCENT = 1
# Drafts of a step. Each needs a row of logits, whose memory is set aside at boot.
MOST_STEP_DRAFTS = 64


class Chunk(NamedTuple):
    """The next `num_tokens` uncomputed tokens of one sequence. Its drafts are the last of them."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this chunk reaches the last known token, so that a new one is sampled."""
        return self.num_tokens - len(self.sequence.draft_ids) == self.sequence.num_uncomputed_tokens


Proposals = Mapping[Sequence, Seq[int]]
"""Tokens that may follow the known ones of decodes: see `speculation.Drafter`."""

BudgetOf = Callable[[StepLoad], PromptBudget]
"""Returns what a step of this load may compute of prompts: `Pace.budget`, or `tokens_alone`."""


def tokens_alone(load: StepLoad) -> PromptBudget:
    """Whatever the prompts cost."""
    return PromptBudget(load.max_tokens)


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """All that a plan depends on. `running` and `waiting` are sorted by `Sequence.order`."""

    blocks: BlockManager
    running: list[Sequence]
    waiting: list[Sequence]
    num_free_rows: int
    max_num_batched_tokens: int
    budget_of: BudgetOf = tokens_alone  # for the prompts of a step that others share
    proposals: Proposals = field(default_factory=dict)


@dataclass(slots=True)
class StepPlan:
    """What one step computes, which sequences are admitted with which cached blocks, and which are preempted."""

    chunks: dict[Sequence, int] = field(default_factory=dict)
    admitted: dict[Sequence, list[int]] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)  # that decodes check; `chunks` count them

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(self.chunks.values())


def schedule(state: SchedulerState) -> StepPlan:
    """Choose the chunks of the next step: decodes first, then what fits of prompts, under way or waiting, in order."""
    builder = _PlanBuilder(state)
    # Decodes come first, one token each, so that no prompt, however long, stalls an answer under way.
    prompts: list[Sequence] = []
    for sequence in state.running:
        if sequence.is_complete:
            continue  # it waits until its last step is read
        if len(sequence.token_ids) - sequence.num_computed_tokens > 1:
            prompts.append(sequence)
        else:
            builder.decode(sequence)
    builder.compute_prompts(prompts)
    if state.proposals:
        builder.add_drafts()
    return builder.plan


class _PlanBuilder:
    """A plan in the making, and what it leaves of the budget and of the pool."""

    def __init__(self, state: SchedulerState) -> None:
        self.plan = StepPlan()
        self._state = state
        self._blocks = state.blocks
        self._block_size_tokens = state.blocks.block_size_tokens
        self._tokens_left = state.max_num_batched_tokens
        self._blocks_left = state.blocks.num_free_blocks
        self._rows_left = state.num_free_rows
        self._preempted: set[Sequence] = set()
        self._released: Counter[int] = Counter()  # by block: holders that the plan preempts
        self._taken: dict[Sequence, int] = {}  # blocks set aside for running sequences
        self._reused: set[int] = set()  # evictable blocks that an admission of this plan holds again

    def decode(self, sequence: Sequence) -> None:
        """Plan the next token of a running sequence."""
        if not self._tokens_left or sequence in self._preempted:
            return
        if len(sequence.token_ids) <= len(sequence.block_table) * self._block_size_tokens or self._take_blocks(
            sequence
        ):
            self.plan.chunks[sequence] = 1
            self._tokens_left -= 1

    def compute_prompts(self, running: list[Sequence]) -> None:
        """Plan the next chunks of prompts under way, and admit as many of the waiting as have one."""
        if not self._tokens_left or not (running or self._state.waiting):
            return
        needs = [
            PromptNeed(one, one.num_uncomputed_tokens, one.num_computed_tokens)
            for one in running
            if one not in self._preempted and self._take_blocks(one)
        ]
        needs = [need for need in needs if need.sequence not in self._preempted]
        load = StepLoad(self._tokens_left, len(self.plan.chunks), len(needs) + len(self._state.waiting))
        is_shared = load.num_decodes or load.num_prompts > 1
        budget = (self._state.budget_of if is_shared else tokens_alone)(load)
        hits: dict[Sequence, list[int]] = {}
        if not self.plan.preempted:  # the preempted must not return by preempting another
            hits = self._reserve_for_waiting(budget, needs)
        for sequence, num_tokens in divide(budget, needs).items():
            self.plan.chunks[sequence] = num_tokens
            if sequence in hits:
                self.plan.admitted[sequence] = hits[sequence]

    def add_drafts(self) -> None:
        """Let decodes check what is proposed for them, with what all else leaves of the budget and of the pool."""
        if self.plan.preempted:
            return
        tokens_left = min(MOST_STEP_DRAFTS, self._state.max_num_batched_tokens - self.plan.num_tokens)
        blocks_left = self._blocks_left - watermark_blocks(self._blocks)
        for sequence, proposed in self._state.proposals.items():
            if self.plan.chunks.get(sequence) != 1:
                continue  # it has no place in this step
            num_known, drafts = len(sequence.token_ids), [*proposed[:tokens_left]]
            missing = self._missing_for_drafts(sequence, num_known + len(drafts))
            if missing > blocks_left:  # as many as fit into the blocks that it has by now
                num_blocks = max(len(sequence.block_table), self._blocks.blocks_for(num_known))
                drafts = drafts[: num_blocks * self._block_size_tokens - num_known]
                missing = 0
            if drafts:
                self.plan.drafts[sequence] = drafts
                self.plan.chunks[sequence] += len(drafts)
                tokens_left, blocks_left = tokens_left - len(drafts), blocks_left - missing

    def _missing_for_drafts(self, sequence: Sequence, num_tokens: int) -> int:
        if num_tokens <= len(sequence.block_table) * self._block_size_tokens:
            return 0
        return self._blocks.missing_blocks(sequence, num_tokens) - self._taken.get(sequence, 0)

    def _reserve_for_waiting(self, budget: PromptBudget, needs: list[PromptNeed]) -> dict[Sequence, list[int]]:
        """Add the waiting for whom there is a row and blocks to `needs`, in order, until the budget is used.

        Room is set aside for each, also for a long prompt that has no chunk in this step: those behind it that have one
        take nothing that it needs. The first for whom there is no room waits for it, and nothing overtakes it. Returns
        the cached blocks of each.
        """
        short = [need for need in needs if not budget.is_long(need)]
        tokens_left = budget.tokens - sum(need.num_tokens for need in short)
        work_left = budget.work - sum(budget.cost(need.num_tokens, need.context_tokens) for need in short)
        admissible: dict[Sequence, list[int]] = {}
        for sequence in self._state.waiting:
            if tokens_left <= 0 or work_left <= 0:
                break
            hits = self._reserve(sequence, is_first=not self._state.running and not admissible)
            if hits is None:
                break
            context_tokens = len(hits) * self._blocks.block_size_tokens
            need = PromptNeed(sequence, len(sequence.token_ids) - context_tokens, context_tokens)
            needs.append(need)
            admissible[sequence] = hits
            if not budget.is_long(need):
                tokens_left -= need.num_tokens
                work_left -= budget.cost(need.num_tokens, context_tokens)
        return admissible

    def _reserve(self, sequence: Sequence, *, is_first: bool) -> list[int] | None:
        """Set a row and blocks aside for a waiting sequence; return its cached blocks, or None where it has no room."""
        if not self._rows_left:
            return None
        hits = self._blocks.match_prefix(sequence)
        held = self._blocks.held_hits(hits)
        reused = [block for block in held if block not in self._reused and not self._blocks.is_held(block)]
        # It gets the blocks of all its known tokens at once, so that no prompt preempts itself half-way.
        fresh_blocks = self._blocks.fresh_blocks(sequence, hits)
        spare_blocks = 0 if is_first else watermark_blocks(self._blocks)
        if fresh_blocks + len(reused) + spare_blocks > self._blocks_left:
            return None
        self._blocks_left -= fresh_blocks + len(reused)
        self._rows_left -= 1
        self._reused.update(reused)
        return hits

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Set the blocks of all known tokens of a running sequence aside, preempting others where the pool is short.

        False: it is preempted itself.
        """
        num_tokens = len(sequence.token_ids)
        if num_tokens > len(sequence.block_table) * self._blocks.block_size_tokens:
            missing = self._blocks.missing_blocks(sequence, num_tokens)
            while missing > self._blocks_left:
                victim = self._victim()
                self._preempt(victim)
                if victim is sequence:
                    return False
            self._blocks_left -= missing
            self._taken[sequence] = missing
        return True

    def _victim(self) -> Sequence:
        """The least urgent, then the least computed (cheapest to compute again), then the last; never the first."""
        first, *others = (one for one in self._state.running if one not in self._preempted)
        return min(others, key=lambda one: (-one.request.priority, one.num_computed_tokens, -one.order), default=first)

    def _preempt(self, victim: Sequence) -> None:
        self._tokens_left += self.plan.chunks.pop(victim, 0)
        self._blocks_left += self._taken.pop(victim, 0) + self._blocks.freed_by(victim, self._released)
        self._released.update(self._blocks.held_by(victim))
        self._preempted.add(victim)
        self.plan.preempted.append(victim)


def watermark_blocks(blocks: BlockManager) -> int:
    """Return how many blocks stay free for running sequences."""
    return max(1, blocks.num_blocks * WATERMARK_PERCENT // 100)


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
        """Queue a newcomer in order: by what it has to compute, so what is cached of its prompt does not delay it."""
        cached_tokens = len(self._blocks.match_prefix(sequence)) * self._blocks.block_size_tokens
        uncached_tokens = len(sequence.token_ids) - cached_tokens
        sequence.order = queue_order(sequence.arrival, sequence.request.priority, uncached_tokens)
        bisect.insort(self._waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, running or waiting, and take its blocks back at once."""
        if sequence.row is None:
            del self._waiting[bisect.bisect_left(self._waiting, _order(sequence), key=_order)]
        else:
            self._release(sequence)

    def plan(self, budget_of: BudgetOf = tokens_alone, proposals: Proposals | None = None) -> StepPlan:
        """Return what the next step should be; nothing is changed.

        `budget_of` bounds the prompts of a step that has decodes or several prompts. `proposals`: of sequences with one
        uncomputed token; no more than may come before they end.
        """
        state = SchedulerState(
            self._blocks,
            self.running,
            self._waiting,
            len(self._free_rows),
            self._max_num_batched_tokens,
            budget_of,
            proposals or {},
        )
        return schedule(state)

    def apply(self, plan: StepPlan) -> list[Chunk]:
        """Prepare a step that was planned just now: rows, blocks and cached tokens are in place when this returns.

        No sequence that it preempts has a step in flight. The caller launches every chunk and then calls `advance`,
        before it plans again.
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
            if sequence in plan.drafts:
                sequence.draft_ids = plan.drafts[sequence]
            # One in sixteen steps of a decode needs a block and one in sixteen fills one: the others skip the calls.
            target_tokens = sequence.num_computed_tokens + num_tokens
            if target_tokens > len(sequence.block_table) * block_size_tokens:
                self._blocks.allocate(sequence, len(sequence.token_ids) + len(sequence.draft_ids))
            if target_tokens >= (sequence.num_published_blocks + 1) * block_size_tokens:
                self._blocks.publish(sequence, target_tokens)
            chunks.append(Chunk(sequence, num_tokens))
        return chunks

    def advance(self, chunks: Iterable[Chunk]) -> None:
        """Count the chunks' known tokens as computed: what the device is given from now on comes after them."""
        for sequence, num_tokens in chunks:
            sequence.num_computed_tokens += num_tokens - len(sequence.draft_ids)
            if sequence.num_computed_tokens >= sequence.window_passes_at_tokens:
                self._blocks.free_outside_window(sequence)

    def make_room(self, sequence: Sequence, num_tokens: int) -> int:
        """Give a decode blocks for its first `num_tokens` tokens while more than the watermark is free; return for how
        many it has blocks. A draft model writes to them before the step is planned."""
        missing = self._blocks.missing_blocks(sequence, num_tokens)
        if 0 < missing <= self._blocks.num_free_blocks - watermark_blocks(self._blocks):
            self._blocks.allocate(sequence, num_tokens)
        return len(sequence.block_table) * self._blocks.block_size_tokens

    def count_accepted(self, sequence: Sequence) -> None:
        """Count the first known token that is not computed as computed: it was a draft of the step that is read."""
        sequence.num_computed_tokens += 1
        self._blocks.publish(sequence, sequence.num_computed_tokens)
        if sequence.num_computed_tokens >= sequence.window_passes_at_tokens:
            self._blocks.free_outside_window(sequence)

    def roll_back(self, plan: StepPlan) -> None:
        """Undo a step that was applied and failed before it was computed; its tokens are planned again.

        What it published is in no block. Sequences that it admitted may share such blocks, so they wait again.
        """
        for sequence in plan.chunks:
            sequence.forget_expected_prompt_logprobs()
            sequence.draft_ids = []
            if sequence.row is not None:
                self._blocks.unpublish_uncomputed(sequence)
        for sequence in plan.admitted:
            if sequence.row is not None:
                self._preempt(sequence)

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
        sequence.row = self._free_rows.allocate(self._blocks.row_of_hits(hits))
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
        """Move a running sequence back to waiting: it keeps its tokens and its order, and loses its blocks."""
        self._release(sequence)
        sequence.num_lost_tokens = sequence.num_computed_tokens
        sequence.num_computed_tokens = 0
        self.num_preemptions_total += 1
        bisect.insort(self._waiting, sequence, key=_order)

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
