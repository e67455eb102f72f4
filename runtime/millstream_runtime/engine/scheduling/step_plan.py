"""Which sequences compute how many tokens in the next step: the decision, pure.

There are no phases. Each step moves the computed tokens of sequences towards their known tokens, under one token
budget (vLLM V1's rule): a long prompt takes several chunks, a decode is a chunk of one token, a preempted sequence
starts again, and a prefix-cache hit starts further on.

`schedule(state) -> plan` has no torch, no clock and no randomness, and changes nothing.

No deadlock: the pool holds at least one sequence of the greatest length, and where the pool is short the first running
sequence in order is never preempted, so it ends; for a turn it may be, by one that goes on instead. No starvation:
clients take turns (see `fair_queue`); within a client the order is the arrival plus the priority's head start and a
bounded delay of long prompts (see `waiting_order`), so after finitely many arrivals every newcomer comes behind. Room
in the pool is given in that order, and `prompt_budget` divides each step so that long and short prompts do not block
each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.fair_queue import QUANTUM_TOKENS, FairQueue, Turns
from millstream_runtime.engine.scheduling.prompt_budget import PromptBudget, PromptNeed, StepLoad, divide
from millstream_runtime.engine.scheduling.sequence import Sequence

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
    """All that a plan depends on. `running` is sorted by `Sequence.order`."""

    blocks: BlockManager
    running: list[Sequence]
    waiting: FairQueue
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
    recomputed_tokens: int = 0  # of the preempted that give way to another client

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
            needs = [need for need in needs if need.sequence not in self._preempted]
        for sequence, num_tokens in divide(budget, self._in_turns(needs)).items():
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
        take nothing that it needs. The first for whom there is no room waits for it, or gets that of a client that was
        served more, and nothing overtakes it. Returns the cached blocks of each.
        """
        short = [need for need in needs if not budget.is_long(need)]
        tokens_left = budget.tokens - sum(need.num_tokens for need in short)
        work_left = budget.work - sum(budget.cost(need.num_tokens, need.context_tokens) for need in short)
        admissible: dict[Sequence, list[int]] = {}
        turns = self._state.waiting.turns(_tokens_by_client(needs))
        while tokens_left > 0 and work_left > 0 and (sequence := turns.head) is not None:
            hits = self._reserve(sequence, is_first=not self._state.running and not admissible)
            if hits is None:
                self._preempt_for(sequence)
                break
            context_tokens = len(hits) * self._blocks.block_size_tokens
            need = PromptNeed(sequence, len(sequence.token_ids) - context_tokens, context_tokens)
            needs.append(need)
            admissible[sequence] = hits
            turns.take(need.num_tokens)
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

    def _in_turns(self, needs: list[PromptNeed]) -> list[PromptNeed]:
        """Merge the prompts of several clients by turns, so that no client's prompts fill a step before another's."""
        by_client: dict[str, list[Sequence]] = {}
        for need in needs:
            by_client.setdefault(need.sequence.request.client, []).append(need.sequence)
        if len(by_client) <= 1:
            return needs
        need_of = {need.sequence: need for need in needs}
        turns, merged = Turns(by_client.values(), self._state.waiting.served_tokens), []
        while (sequence := turns.head) is not None:
            merged.append(need_of[sequence])
            turns.take(need_of[sequence].num_tokens)
        return merged

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
        """Of the client that was served most, or else holds most, the least urgent, then the least computed (cheapest
        to compute again), then the last; never the first of all that run."""
        first, *others = (one for one in self._state.running if one not in self._preempted)
        held = Counter[str]()
        for one in self._state.running:
            held[one.request.client] += one.num_computed_tokens
        return min(others, key=lambda one: self._cheapness(one, held), default=first)

    def _cheapness(self, one: Sequence, held: Mapping[str, int]) -> tuple[int, ...]:
        request = one.request
        served_tokens = self._state.waiting.served_tokens(request.client)
        by_client = (-served_tokens, -held[request.client])
        return (*by_client, -request.priority, one.num_computed_tokens, -one.order)

    def _preempt_for(self, sequence: Sequence) -> None:
        """Preempt for a waiting sequence whose client is behind, so that the next step has room for it.

        Victims are of clients that have more rows and were served QUANTUM_TOKENS more. Nothing is preempted while an
        answer ends by itself, nor if it does not make enough room, nor where too much would be computed again.
        """
        running, client = self._state.running, sequence.request.client
        rows = Counter(one.request.client for one in running)
        if rows[client] == len(running) or any(one.is_complete for one in running):
            return
        served_tokens = self._state.waiting.served_tokens
        least_served = served_tokens(client) + QUANTUM_TOKENS
        candidates = [one for one in running if served_tokens(one.request.client) >= least_served]
        candidates.sort(key=lambda one: self._cheapness(one, rows))
        hits = self._blocks.match_prefix(sequence)
        victims: list[Sequence] = []
        recomputed_tokens, blocks_left, released = 0, self._blocks_left, self._released.copy()
        for victim in candidates:
            if rows[victim.request.client] <= rows[client]:
                continue
            victims.append(victim)
            rows[victim.request.client] -= 1
            recomputed_tokens += self._recomputed_tokens(victim)
            blocks_left += self._taken.get(victim, 0) + self._blocks.freed_by(victim, released)
            released.update(self._blocks.held_by(victim))
            if self._needed_blocks(sequence, hits, released) <= blocks_left:
                break
        else:
            return
        if self._state.waiting.may_recompute(recomputed_tokens):
            self.plan.recomputed_tokens = recomputed_tokens
            for victim in victims:
                self._preempt(victim)

    def _needed_blocks(self, sequence: Sequence, hits: list[int], released: Mapping[int, int]) -> int:
        """Return how many free blocks an admission takes once the holders in `released` are preempted."""
        unheld = sum(not self._blocks.is_held(block, released.get(block, 0)) for block in self._blocks.held_hits(hits))
        needed = self._blocks.fresh_blocks(sequence, hits) + unheld + watermark_blocks(self._blocks)
        return min(needed, self._blocks.num_blocks)  # alone in the pool it needs no watermark

    def _recomputed_tokens(self, victim: Sequence) -> int:
        """Return how much of a sequence is computed again after a preemption, if its cached blocks are still there."""
        if not self._blocks.has_prefix_cache or not victim.uses_prefix_cache:
            return victim.num_computed_tokens
        return max(0, victim.num_computed_tokens - victim.num_published_blocks * self._block_size_tokens)

    def _preempt(self, victim: Sequence) -> None:
        self._tokens_left += self.plan.chunks.pop(victim, 0)
        self._blocks_left += self._taken.pop(victim, 0) + self._blocks.freed_by(victim, self._released)
        self._released.update(self._blocks.held_by(victim))
        self._preempted.add(victim)
        self.plan.preempted.append(victim)


def watermark_blocks(blocks: BlockManager) -> int:
    """Return how many blocks stay free for running sequences."""
    return max(1, blocks.num_blocks * WATERMARK_PERCENT // 100)


def _tokens_by_client(needs: Iterable[PromptNeed]) -> Counter[str]:
    tokens = Counter[str]()
    for need in needs:
        tokens[need.sequence.request.client] += need.num_tokens
    return tokens
