"""Drafts from a smaller model with the same vocabulary (Leviathan et al. 2023, arXiv 2211.17192).

    pass 1    each sequence's tokens that the draft model has not read, and its last one   -> draft 1 of each
    pass 2    draft 1 of each sequence                                                     -> draft 2
    ...       all drafting sequences in one pass per draft

It has weights and a KV pool of its own, under the block tables of the target (`draft_keys` knows what is in it). What
it has not read of a prompt, it reads in chunks, a bounded time per step; until then the request has no drafts.

Which token of a row is the draft, `draft_choice` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from millstream_runtime.engine.device_policy import DevicePolicy
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.execution.step_input import ChunkInput, StepInput
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation.catching_up import ALWAYS_TOKENS, CatchingUp
from millstream_runtime.engine.speculation.draft_choice import DraftChoice, MostProbable
from millstream_runtime.engine.speculation.draft_keys import DraftKeys, ReadTokens, draft_table
from millstream_runtime.engine.speculation.skip import Skip
from millstream_runtime.logs import log

# Known tokens that it has not read where all drafts stood: the last draft, and the token that came with the check.
DRAFT_LAG_TOKENS = 2


@dataclass(slots=True)
class _Drafting:
    """A sequence that is being drafted for."""

    sequence: Sequence
    progress: ReadTokens
    most: int  # drafts
    stop: int  # tokens that the first pass computes of it end here
    blocks: Seq[int]  # from the first that the draft model sees
    is_contiguous: bool
    drafts: list[int] = field(default_factory=list)
    is_finite: bool = True

    @property
    def is_read(self) -> bool:
        """Whether the first pass computes its last known token."""
        return self.stop == len(self.sequence.token_ids)

    def chunk(self, num_tokens: int, stop: int, num_read_rows: int = 1) -> ChunkInput:
        """Its `num_tokens` tokens before `stop`, of which the last or none is read."""
        first = self.progress.first
        return ChunkInput(
            num_tokens,
            stop - first,
            first,
            self.blocks[0],
            len(self.blocks),
            None if self.is_contiguous else [*self.blocks],
            num_drafts=num_tokens - 1 if num_tokens <= ALWAYS_TOKENS else 0,  # then attention takes it as a check
            num_read_rows=num_read_rows,
        )


class DraftModelDrafter:
    """A `Drafter`. Sequences have blocks for the tokens that it is asked for, but the last.

    Attributes:
        has_read_prompts: whether the last proposals took time to read what came before them.
    """

    def __init__(
        self,
        forward: Forward,
        policy: DevicePolicy,
        block_size_tokens: int,
        context_tokens: int,
        most_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
        choice: DraftChoice | None = None,
    ) -> None:
        """`forward`: of the draft model, over its pool. `context_tokens`: longer sequences have no drafts.
        `most_tokens`: of one pass. `choice`: of each draft; None: the most probable token."""
        self._choice = choice or MostProbable()
        self._forward, self._policy, self._clock = forward, policy, clock
        self._keys = DraftKeys(block_size_tokens, forward.longest_window)
        self._context_tokens = context_tokens
        self._vocab_size = forward.model.config.vocab_size
        self._catching_up = CatchingUp(most_tokens)
        self._refused: dict[Sequence, Skip] = {}
        self.has_read_prompts = False

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int] | Skip]:
        """See `Drafter.propose`."""
        answer: dict[Sequence, Seq[int] | Skip] = {}
        ready: list[_Drafting] = []
        self._choice.begin()
        for sequence, most in wanted.items():
            most = min(most, self._context_tokens - len(sequence.token_ids))
            reason = self._refused.get(sequence) or (Skip.DRAFT_CONTEXT if most < 1 else None)
            if reason is None:
                ready.append(self._drafting(sequence, most))
            else:
                answer[sequence] = reason
        with torch.inference_mode():
            self._draft(self._first_pass(ready))
        for one in ready:
            answer[one.sequence] = self._refused.get(one.sequence) or one.drafts or Skip.CATCHING_UP
        return answer

    def reading_seconds(self, sequence: Sequence) -> float:
        """See `Drafter`."""
        return self._catching_up.seconds(len(sequence.token_ids) - self._keys.progress(sequence).num_computed)

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter.forget`. Its keys stay for those that begin with the same tokens."""
        self._keys.forget(sequence)
        self._refused.pop(sequence, None)

    def _drafting(self, sequence: Sequence, most: int) -> _Drafting:
        progress, table = self._keys.progress(sequence), draft_table(sequence)
        blocks = table.block_table[table.num_passed_blocks :] if table.num_passed_blocks else table.block_table
        return _Drafting(sequence, progress, most, progress.num_computed, blocks, table.blocks_are_contiguous)

    def _first_pass(self, ready: list[_Drafting]) -> list[_Drafting]:
        """Read what is not read, as far as there is time; return the sequences that have their first draft."""
        chosen = []
        counts = self._catching_up.divide([_unread(one) for one in ready])
        self.has_read_prompts = max(counts, default=0) > ALWAYS_TOKENS
        for one, num_tokens in zip(ready, counts, strict=True):
            start = one.progress.num_computed
            one.stop = start + num_tokens
            if max(one.sequence.token_ids[start : one.stop], default=0) >= self._vocab_size:
                self._refused[one.sequence] = Skip.DRAFT_VOCABULARY
            elif num_tokens:
                chosen.append(one)
        if not chosen:
            return []
        chosen.sort(key=_place_in_step)
        num_tokens = sum(one.stop - one.progress.num_computed for one in chosen)
        began = self._clock()
        drafting = self._read(chosen, num_tokens)
        self._catching_up.observe(num_tokens, self._clock() - began)
        return drafting

    def _read(self, chosen: list[_Drafting], num_tokens: int) -> list[_Drafting]:
        token_ids: list[int] = []
        chunks, rows = [], []
        for one in chosen:
            start, known = one.progress.num_computed, one.sequence.token_ids
            self._keys.write(one.sequence, one.stop + one.most - 1 if one.is_read else one.stop)
            token_ids += known[start : one.stop]
            chunks.append(one.chunk(one.stop - start, one.stop, int(one.is_read)))
            if one.is_read:
                rows.append(len(token_ids) - 1)
        read = [one for one in chosen if one.is_read]
        found = self._tokens(token_ids, chunks, rows, read)
        for one in chosen:
            one.progress.num_computed = one.stop
        self._append(read, found)
        return read

    def _draft(self, drafting: list[_Drafting]) -> None:
        """All drafts behind the first of each."""
        while drafting := [one for one in drafting if one.is_finite and len(one.drafts) < one.most]:
            chunks = [one.chunk(1, one.stop + len(one.drafts)) for one in drafting]
            found = self._tokens([one.drafts[-1] for one in drafting], chunks, range(len(drafting)), drafting)
            for one in drafting:
                one.progress.drafted.append(one.drafts[-1])
            self._append(drafting, found)

    def _append(self, drafting: list[_Drafting], tokens: list[int]) -> None:
        for one, token_id in zip(drafting, tokens, strict=True):
            if token_id >= 0:
                one.drafts.append(token_id)
                continue
            one.is_finite = False
            self._refused[one.sequence] = Skip.DRAFT_NOT_FINITE
            self._forward.zero_blocks(self._keys.discard(one.sequence))
            log.warning("draft_not_finite", request_id=one.sequence.request.request_id)

    def _tokens(
        self, token_ids: list[int], chunks: list[ChunkInput], rows: Seq[int], drafting: list[_Drafting]
    ) -> list[int]:
        """Compute a pass; return the next draft behind each of `rows`, whose requests are `drafting`; -1 where its
        logits are no numbers."""
        self._policy.before_compute(len(token_ids))
        step = StepInput(token_ids, chunks, [list(rows)])
        residual = self._forward.residual(step)
        if not rows:
            return []
        logits = self._forward.logits(residual, step.head_rows[0])
        return self._choice.choose(logits, [(one.sequence, len(one.drafts)) for one in drafting])


def _place_in_step(one: _Drafting) -> tuple[bool, bool, int]:
    """Decodes first, then what attention takes as checks, then prompts, each by their place in the pool."""
    num_tokens = one.stop - one.progress.num_computed
    return num_tokens > 1, num_tokens > ALWAYS_TOKENS, one.blocks[0]


def _unread(one: _Drafting) -> tuple[int, int]:
    """Known tokens that the draft model has not read, and how many more may come."""
    sequence = one.sequence
    left = sequence.request.sampling.max_tokens - sequence.num_generated_tokens
    return len(sequence.token_ids) - one.progress.num_computed, left
