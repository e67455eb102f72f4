"""The queues of sequences, and how a plan is applied to them.

    waiting (in order) --admit--> running (a row each) --finish--> gone
              ^--------------preempt---------------'

`step_plan.schedule` decides what the next step computes; `Scheduler` owns the queues, the rows and the blocks, and
changes them by what was decided.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable

from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.fair_queue import FairQueue, order_of
from millstream_runtime.engine.scheduling.rows import Rows
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.scheduling.step_plan import (
    BudgetOf,
    Chunk,
    Proposals,
    SchedulerState,
    StepPlan,
    schedule,
    tokens_alone,
    watermark_blocks,
)
from millstream_runtime.engine.scheduling.waiting_order import queue_order


class Scheduler:
    """Continuous batching: sequences join and leave between any two steps."""

    def __init__(self, blocks: BlockManager, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self._blocks = blocks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting = FairQueue()
        self.running: list[Sequence] = []  # in order
        self._free_rows = Rows(max_num_seqs)
        self.num_preemptions_total = 0
        self.ended_by_preemptions: Counter[int] = Counter()  # users' requests, by how often each was preempted
        self.recomputed_tokens_total = 0
        self.queried_tokens_total = 0  # prompt tokens that were looked up in the prefix cache
        self.hit_tokens_total = 0
        # Kept by addition, since they are read after every step.
        self.queued_tokens = 0  # to be computed before the next token of each, as `Sequence.num_queued_tokens` says
        self.running_tokens = 0  # computed, of the running

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
        self._count_queued(sequence, uncached_tokens)
        self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, running or waiting, and take its blocks back at once."""
        if not sequence.request.is_heartbeat:
            self.ended_by_preemptions[sequence.num_preemptions] += 1
        self._count_queued(sequence, 0)
        if sequence.row is None:
            self._waiting.remove(sequence)
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
        self._waiting.count_recomputed(plan.recomputed_tokens)
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
            num_known = num_tokens - len(sequence.draft_ids)
            sequence.num_computed_tokens += num_known
            self.running_tokens += num_known
            if sequence.num_queued_tokens:
                self._count_queued(sequence, sequence.num_prefill_tokens)
            self._waiting.count(sequence)
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
        self.running_tokens += 1
        sequence.num_counted_tokens = max(sequence.num_counted_tokens, sequence.num_computed_tokens)
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
        self.running_tokens -= sequence.num_computed_tokens
        sequence.num_computed_tokens = 0
        sequence.block_hashes.clear()
        self._count_queued(sequence, sequence.num_prefill_tokens)

    def check_counts(self) -> None:
        """Check `queued_tokens` and `running_tokens` against the sequences.

        Raises:
            RuntimeError: names the one that is wrong.
        """
        computed = sum(one.num_computed_tokens for one in self.running)
        if self.running_tokens != computed:
            raise RuntimeError(f"{self.running_tokens} tokens count as running, but the running have {computed}.")
        queued = sum(one.num_queued_tokens for one in [*self.running, *self._waiting])
        prefills = sum(one.num_prefill_tokens for one in self.running)
        counted = sum(one.num_queued_tokens for one in self.running)
        if self.queued_tokens != queued or counted != prefills:
            raise RuntimeError(
                f"{self.queued_tokens} tokens count as queued, but all sequences have {queued}; of the running "
                f"{counted}, but they have {prefills} to compute."
            )

    def _count_queued(self, sequence: Sequence, num_tokens: int) -> None:
        self.queued_tokens += num_tokens - sequence.num_queued_tokens
        sequence.num_queued_tokens = num_tokens

    def _admit(self, sequence: Sequence, hits: list[int]) -> None:
        """Move a sequence from waiting to running, with the cached blocks that were found for it."""
        self._waiting.remove(sequence)
        sequence.row = self._free_rows.allocate(self._blocks.row_of_hits(hits))
        bisect.insort(self.running, sequence, key=order_of)
        self._blocks.attach_cached(sequence, hits)
        self.running_tokens += sequence.num_computed_tokens
        self._count_queued(sequence, sequence.num_prefill_tokens)

    def _allocate_admitted(self, sequence: Sequence, num_tokens: int) -> int:
        """Allocate blocks for all known tokens of an admitted sequence; return how many planned tokens are left.

        Sequences admitted in the same step may have published what it needs (the choices of one prompt): those blocks
        are shared too.
        """
        self.running_tokens -= sequence.num_computed_tokens
        self._blocks.attach_cached(sequence, self._blocks.match_prefix(sequence, start_block=len(sequence.block_table)))
        self._blocks.allocate(sequence, len(sequence.token_ids))
        hit_tokens = sequence.num_computed_tokens
        self.running_tokens += hit_tokens
        self._count_queued(sequence, sequence.num_prefill_tokens)
        sequence.num_counted_tokens = max(sequence.num_counted_tokens, hit_tokens)
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
        self._count_queued(sequence, sequence.num_prefill_tokens)
        sequence.num_preemptions += 1
        self.num_preemptions_total += 1
        self._waiting.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.row is None:
            raise ValueError(f"request {sequence.request.request_id} is not running")
        self._blocks.free(sequence)
        self.running_tokens -= sequence.num_computed_tokens
        del self.running[bisect.bisect_left(self.running, order_of(sequence), key=order_of)]
        self._free_rows.release(sequence.row, is_cached=self._blocks.region_is_cached(sequence.row))
        sequence.row = None
