"""Who computes how many tokens in the next step. Pure: no torch, no clock, no randomness.

There are no phases. Each sequence's computed tokens chase its known tokens under one budget a step (vLLM V1's
rule): a long prompt is a long chase in chunks, a decode a chase of one token, a preempted sequence starts again.

    waiting (by arrival) --admit--> running (a row each) --finish--> gone
              ^--------------preempt---------------'

No deadlock: the pool holds at least one sequence of the greatest length, and the oldest running sequence is never
preempted, so it always ends. No starvation: preempted or new, sequences are admitted strictly by arrival, so every
sequence becomes the oldest in time.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from millstream_runtime.engine.block_manager import BlockManager
from millstream_runtime.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_tokens` uncomputed tokens of one sequence."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this chunk reaches the last known token, so that a new one is sampled."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes, and who was put back to make room for it."""

    chunks: list[Chunk]
    preempted: list[Sequence]

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.num_tokens for chunk in self.chunks)


class Scheduler:
    """Continuous batching: sequences join and leave between any two steps."""

    def __init__(self, blocks: BlockManager, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self._blocks = blocks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: list[tuple[int, Sequence]] = []  # a heap by arrival
        self.running: list[Sequence] = []  # by arrival
        self._free_rows = list(range(max_num_seqs))  # a heap: the lowest row first keeps rows close together
        # Room left for the running ones to grow into: without it each admission soon costs a preemption.
        self._watermark_blocks = max(1, blocks.num_blocks // 100)
        self.num_preemptions_total = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that have no row."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self.running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by its arrival."""
        heapq.heappush(self._waiting, (sequence.arrival, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, running or waiting, and take its blocks back at once."""
        if sequence.row is None:
            self._waiting.remove((sequence.arrival, sequence))
            heapq.heapify(self._waiting)
        else:
            self._release(sequence)

    def schedule(self) -> StepPlan:
        """Choose the chunks of the next step: the running by arrival, then as many of the waiting as fit.

        The caller computes every chunk and advances `num_computed_tokens` before it calls again.
        """
        planned: dict[Sequence, int] = {}
        preempted: list[Sequence] = []
        self._plan_running(planned, preempted)
        if not preempted:  # what was just put back must not return by pushing out another
            self._admit(planned)
        return StepPlan([Chunk(sequence, count) for sequence, count in planned.items()], preempted)

    def _plan_running(self, planned: dict[Sequence, int], preempted: list[Sequence]) -> None:
        budget = self._max_num_batched_tokens
        # Decodes come first, one token each, so that no prompt, however long, stalls an answer under way.
        for sequence in sorted(self.running, key=lambda one: (one.num_uncomputed_tokens > 1, one.arrival)):
            if sequence.row is None:
                continue  # preempted for another in this very loop
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            if num_tokens == 0:
                break
            while not self._blocks.can_grow(sequence, sequence.num_computed_tokens + num_tokens):
                victim = self._victim()
                budget += planned.pop(victim, 0)
                self._preempt(victim)
                preempted.append(victim)
                if victim is sequence:
                    break
            else:
                self._blocks.grow(sequence, sequence.num_computed_tokens + num_tokens)
                planned[sequence] = num_tokens
                budget -= num_tokens

    def _admit(self, planned: dict[Sequence, int]) -> None:
        budget = self._max_num_batched_tokens - sum(planned.values())
        while self._waiting and self._free_rows and budget > 0:
            _, sequence = self._waiting[0]
            num_known_tokens = len(sequence.token_ids)
            spare_blocks = self._watermark_blocks if self.running else 0
            if self._blocks.missing_blocks(sequence, num_known_tokens) + spare_blocks > self._blocks.num_free_blocks:
                break  # nobody overtakes: the oldest waits for room, and gets it
            heapq.heappop(self._waiting)
            sequence.row = heapq.heappop(self._free_rows)
            self._blocks.grow(sequence, num_known_tokens)
            self.running.append(sequence)
            self.running.sort(key=lambda one: one.arrival)
            planned[sequence] = min(num_known_tokens, budget)
            budget -= planned[sequence]

    def _victim(self) -> Sequence:
        """Least computed first: the cheapest to compute again; among equals the youngest; never the oldest of all."""
        oldest, *others = self.running
        return min(others, key=lambda one: (one.num_computed_tokens, -one.arrival), default=oldest)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting with its tokens kept and its blocks given up."""
        self._release(sequence)
        sequence.num_computed_tokens = 0
        self.num_preemptions_total += 1
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.row is None:
            raise ValueError(f"request {sequence.request.request_id} is not running")
        self._blocks.free(sequence)
        self.running.remove(sequence)
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = None
