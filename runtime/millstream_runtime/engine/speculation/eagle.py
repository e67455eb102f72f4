"""Drafts from an EAGLE head (Li et al. 2024, arXiv 2401.15077): one decoder layer over the target's hidden states.

    token j of a sequence     t(j), and the target's state of t(j - 1)            -> a guess at its state of t(j)
    pass 1    each sequence's tokens that the head has not read, and its last one -> draft 1 of each
    pass 2    draft 1 of each sequence, and the head's own guess of pass 1        -> draft 2
    ...       all drafting sequences in one pass per draft

The head reads known tokens with the target's own states, which the target leaves in a pool under its block tables
(`HiddenStatePool`): also of prefixes that the cache knew. Drafts that stood are read again with these. A sequence's
first token has no state before it, so the head sees a sequence from its second token on:

    target's slots    | 0  1  2  3 ...  15 | 16 ...
    the head's keys      | 1  2  3 ...  15   16 ...      its blocks are slots, so its tables begin anywhere

Of a tree of drafts (`draft_tree`) each pass behind the first gives the next level of all branches: it computes the last
known token again, and behind it all drafts so far as a check, whose mask shows each the drafts on its own path. One
layer of few rows costs little, and so the keys of branches need no places that outlive a pass.

A key follows from the tokens up to its own, as a key of the target does. So a block whose keys the head has is known by
the hash of its prefix, as that of a draft model (`draft_keys`).

Drafts are the most probable tokens, also of sampled requests: see docs/speculation.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from millstream_runtime.config import MAX_DRAFT_TOKENS_LIMIT
from millstream_runtime.draft_tree import DraftTree
from millstream_runtime.engine.device_policy import DevicePolicy
from millstream_runtime.engine.eagle.head_forward import HeadForward
from millstream_runtime.engine.execution.step_input import ChunkInput
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation.catching_up import CatchingUp
from millstream_runtime.engine.speculation.draft_keys import DraftKeys, ReadTokens, draft_table
from millstream_runtime.engine.speculation.skip import Skip
from millstream_runtime.logs import log

# Read with the first draft, whatever it takes: all that a check may have added.
READ_AT_ONCE_TOKENS = MAX_DRAFT_TOKENS_LIMIT + 1


@dataclass(slots=True, eq=False)
class _Reading:
    """A sequence that is being drafted for."""

    sequence: Sequence
    progress: ReadTokens
    most: int  # drafts
    blocks: Seq[int]  # from the first that the head sees
    is_contiguous: bool
    block_size_tokens: int
    stop: int = 0  # tokens that the first pass computes of it end here
    drafts: list[int] = field(default_factory=list)
    is_finite: bool = True

    @property
    def first(self) -> int:
        """The first token that the head sees: the one before it gives the state."""
        return self.progress.first + 1

    @property
    def start(self) -> int:
        """The first token that the head has not read."""
        return max(self.progress.num_computed, self.first)

    @property
    def num_unread(self) -> int:
        return len(self.sequence.token_ids) - self.start

    @property
    def is_read(self) -> bool:
        """Whether the first pass computes its last known token."""
        return self.stop == len(self.sequence.token_ids)

    def slots(self, start: int, stop: int) -> Seq[int]:
        """Slots in the pool of its tokens."""
        size, first = self.block_size_tokens, self.progress.first
        if self.is_contiguous:
            shift = self.blocks[0] * size - first
            return range(start + shift, stop + shift)
        return [self.blocks[(token - first) // size] * size + token % size for token in range(start, stop)]

    def chunk(self, num_tokens: int, stop: int) -> ChunkInput:
        """Its `num_tokens` tokens before `stop`; a few are attended to like a check, many like a prompt."""
        slots = self.slots(self.first, stop)
        return ChunkInput(
            num_tokens,
            len(slots),
            self.progress.first,  # positions are those of the tokens that give the states
            slots[0],
            len(slots),
            None if self.is_contiguous else [*slots],
            num_drafts=num_tokens - 1 if num_tokens <= READ_AT_ONCE_TOKENS else 0,
        )

    def branches(self, parents: tuple[int, ...]) -> ChunkInput:
        """Its last known token, and all its drafts behind it. `parents`: of the drafts; see `AttentionChunk`."""
        slots = self.slots(self.first, self.stop + len(self.drafts))
        return ChunkInput(
            1 + len(self.drafts),
            len(slots),
            self.progress.first,
            slots[0],
            len(slots),
            None if self.is_contiguous else [*slots],
            num_drafts=len(self.drafts),
            parents=parents,
        )

    @property
    def place(self) -> tuple[int, int]:
        """Where it comes in the first pass: decodes, checks, prompts, each in the order of their blocks."""
        count = self.stop - self.start
        return (count > 1) + (count > READ_AT_ONCE_TOKENS), self.blocks[0]


class EagleDrafter:
    """A `Drafter`. Sequences have blocks for the tokens that it is asked for, but the last.

    Attributes:
        has_read_prompts: whether the last proposals took time to read what came before them.
    """

    def __init__(
        self,
        forward: HeadForward,
        policy: DevicePolicy,
        block_size_tokens: int,
        context_tokens: int,
        most_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
        tree: DraftTree | None = None,
    ) -> None:
        """`context_tokens`: longer sequences have no drafts. `most_tokens`: of one pass. `tree`: of all drafts; None:
        each follows the one before it."""
        self._forward, self._policy, self._clock = forward, policy, clock
        window = forward.longest_window
        # One more than it reads back: the first token that is left has no key.
        self._keys = DraftKeys(block_size_tokens, None if window is None else window + 1)
        self._block_size_tokens, self._context_tokens = block_size_tokens, context_tokens
        self._catching_up, self._tree = CatchingUp(most_tokens), tree
        self._most_drafts = MAX_DRAFT_TOKENS_LIMIT if tree is None else len(tree.nodes)
        self._refused: dict[Sequence, Skip] = {}
        self.has_read_prompts = False

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int] | Skip]:
        """See `Drafter.propose`."""
        answer: dict[Sequence, Seq[int] | Skip] = {}
        ready: list[_Reading] = []
        for sequence, most in wanted.items():
            most = min(most, self._most_drafts, self._context_tokens - len(sequence.token_ids))
            reason = self._refused.get(sequence) or (Skip.DRAFT_CONTEXT if most < 1 else None)
            if reason is None:
                ready.append(self._reading(sequence, most))
            else:
                answer[sequence] = reason
        with torch.inference_mode():
            self._draft(*self._first_pass(ready))
        for one in ready:
            answer[one.sequence] = self._refused.get(one.sequence) or one.drafts or Skip.CATCHING_UP
        return answer

    def reading_seconds(self, sequence: Sequence) -> float:
        """See `Drafter`."""
        return self._catching_up.seconds(self._reading(sequence, 1).num_unread)

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter.forget`. Its keys stay for those that begin with the same tokens."""
        self._keys.forget(sequence)
        self._refused.pop(sequence, None)

    def _reading(self, sequence: Sequence, most: int) -> _Reading:
        progress, table = self._keys.progress(sequence), draft_table(sequence)
        blocks = table.block_table[table.num_passed_blocks :] if table.num_passed_blocks else table.block_table
        return _Reading(sequence, progress, most, blocks, table.blocks_are_contiguous, self._block_size_tokens)

    def _first_pass(self, ready: list[_Reading]) -> tuple[list[_Reading], Tensor | None]:
        """Read what is not read, as far as there is time; return the sequences that have their first draft, in the
        order of their blocks, and the head's states of their last tokens `[n, hidden]`."""
        chosen = []
        for one, num_tokens in zip(ready, self._counts(ready), strict=True):
            one.stop = one.start + num_tokens
            if num_tokens > 0:
                chosen.append(one)
        if not chosen:
            return [], None
        chosen.sort(key=lambda one: one.place)
        num_tokens = sum(one.stop - one.start for one in chosen)
        began = self._clock()
        drafting, states = self._read(chosen)
        self._catching_up.observe(num_tokens, self._clock() - began)
        return drafting, states

    def _counts(self, ready: list[_Reading]) -> list[int]:
        """How many tokens each sequence reads now."""
        behind = [one for one in ready if one.num_unread > READ_AT_ONCE_TOKENS]
        counts = self._catching_up.divide([(one.num_unread, _tokens_left(one.sequence)) for one in behind])
        self.has_read_prompts = any(counts)
        of_behind = iter(counts)
        return [next(of_behind) if one.num_unread > READ_AT_ONCE_TOKENS else one.num_unread for one in ready]

    def _read(self, chosen: list[_Reading]) -> tuple[list[_Reading], Tensor | None]:
        token_ids: list[int] = []
        state_slots: list[int] = []
        chunks = []
        rows: dict[_Reading, int] = {}
        for one in chosen:
            start, stop = one.start, one.stop
            self._keys.write(one.sequence, stop + one.most - 1 if one.is_read else stop)
            token_ids += one.sequence.token_ids[start:stop]
            state_slots += one.slots(start - 1, stop - 1)
            chunks.append(one.chunk(stop - start, stop))
            if one.is_read:
                rows[one] = len(token_ids) - 1
        states = self._compute(token_ids, self._forward.target_states(state_slots), chunks)
        for one in chosen:
            one.progress.num_computed = one.stop
        read = sorted(rows, key=lambda one: one.blocks[0])
        if not read:
            return [], None
        last_states = self._forward.rows(states, [rows[one] for one in read])
        return read, last_states

    def _draft(self, drafting: list[_Reading], states: Tensor | None) -> None:
        """All drafts. `states` `[n, hidden]`: behind the last known token of each."""
        if states is None:
            return
        if self._tree is not None:
            self._draft_tree(self._tree, drafting, states)
            return
        self._append(drafting, [[token_id] for token_id in self._forward.tokens(states)])
        while True:
            kept = [row for row, one in enumerate(drafting) if one.is_finite and len(one.drafts) < one.most]
            if not kept:
                return
            if len(kept) < len(drafting):
                drafting, states = [drafting[row] for row in kept], self._forward.rows(states, kept)
            chunks = [one.chunk(1, one.stop + len(one.drafts)) for one in drafting]
            states = self._compute([one.drafts[-1] for one in drafting], states, chunks)
            self._append(drafting, [[token_id] for token_id in self._forward.tokens(states)])

    def _draft_tree(self, tree: DraftTree, drafting: list[_Reading], states: Tensor) -> None:
        """The same, level by level. `states` `[n, hidden]`: behind the last known token of each."""
        nodes, parents = tree.nodes, tree.parents
        first_rows = [*range(len(drafting))]  # of `states`: behind the last known token, then behind each draft
        while True:
            levels = [_next_level(tree, one) for one in drafting]
            # A parent of -1 is the last known token.
            of_nodes = [
                [first + 1 + parents[node] for node in of] for first, of in zip(first_rows, levels, strict=True)
            ]
            rows = sorted({row for of in of_nodes for row in of})
            most_ranks = 1 + max(nodes[node][-1] for of in levels for node in of)
            ranked = dict(
                zip(rows, self._forward.most_probable(self._forward.rows(states, rows), most_ranks), strict=True)
            )
            self._append(
                drafting,
                [
                    [ranked[row][nodes[node][-1]] for row, node in zip(own, of, strict=True)]
                    for own, of in zip(of_nodes, levels, strict=True)
                ],
            )
            kept = [place for place, one in enumerate(drafting) if one.is_finite and len(one.drafts) < one.most]
            if not kept:
                return
            drafting, first_rows = [drafting[place] for place in kept], [first_rows[place] for place in kept]
            states, first_rows = self._compute_branches(drafting, states, first_rows, parents)

    def _compute_branches(
        self, drafting: list[_Reading], states: Tensor, first_rows: list[int], parents: tuple[int, ...]
    ) -> tuple[Tensor, list[int]]:
        """Compute the last known token and all drafts of each; return the states behind them, and where each begins."""
        token_ids: list[int] = []
        rows: list[int] = []  # of the states that are read: the target's behind known tokens, then `states`
        starts, chunks = [], []
        for place, (one, first) in enumerate(zip(drafting, first_rows, strict=True)):
            starts.append(len(token_ids))
            of_drafts = parents[: len(one.drafts)]
            token_ids += [one.sequence.token_ids[-1], *one.drafts]
            rows += [place, *(len(drafting) + first + 1 + parent for parent in of_drafts)]
            chunks.append(one.branches(of_drafts))
        slots = [slot for one in drafting for slot in one.slots(one.stop - 2, one.stop - 1)]
        given = self._forward.rows(torch.cat((self._forward.target_states(slots), states)), rows)
        return self._compute(token_ids, given, chunks), starts

    def _append(self, drafting: list[_Reading], found: list[list[int]]) -> None:
        """`found`: the next drafts of each."""
        for one, tokens in zip(drafting, found, strict=True):
            if min(tokens, default=0) >= 0:
                one.drafts += tokens
                continue
            one.is_finite = False
            self._refused[one.sequence] = Skip.DRAFT_NOT_FINITE
            size = self._block_size_tokens
            damaged = self._keys.discard(one.sequence)
            self._forward.zero_slots([slot for block in damaged for slot in range(block * size, (block + 1) * size)])
            log.warning("draft_not_finite", request_id=one.sequence.request.request_id)

    def _compute(self, token_ids: list[int], states: Tensor, chunks: list[ChunkInput]) -> Tensor:
        self._policy.before_compute(len(token_ids))
        return self._forward.forward(token_ids, states, chunks)


def _next_level(tree: DraftTree, one: _Reading) -> range:
    """The nodes of the level behind those that it has, as far as it may have more: their places in the tree."""
    start = len(one.drafts)
    level = len(tree.nodes[start])
    stop = start
    while stop < one.most and len(tree.nodes[stop]) == level:
        stop += 1
    return range(start, stop)


def _tokens_left(sequence: Sequence) -> int:
    """How many more may come of it."""
    return sequence.request.sampling.max_tokens - sequence.num_generated_tokens
