"""What a step that was read gives its requests: the tokens that stand, and which requests end with them."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from millstream_runtime.draft_tree import DraftTree
from millstream_runtime.engine.ending import Ending
from millstream_runtime.engine.execution.model_runner import ModelRunner, Sampled
from millstream_runtime.engine.execution.overlap import StepInFlight
from millstream_runtime.engine.request import FinishReason, RequestError, TokenOutput
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation.drafting import Drafting


@dataclass(slots=True)
class Accepting:
    """Accepts the tokens of an engine's steps, and ends its requests.

    Attributes:
        sequences: the engine's requests that have not ended, by id.
        drafting: None: no step checks drafts.
        tree: of the drafts of a check; None: each follows the one before it.
    """

    sequences: MutableMapping[str, Sequence]
    scheduler: Scheduler
    blocks: BlockManager
    runner: ModelRunner
    ending: Ending
    drafting: Drafting | None
    tree: DraftTree | None

    def accept(self, step: StepInFlight, sampled: list[Sampled]) -> list[TokenOutput]:
        """Accept what a step sampled: a token for each of its sequences that sample, and one behind each draft."""
        for sequence, _ in step.chunks:
            sequence.steps_in_flight -= 1
        leaving = [one for one, _ in step.chunks if one.has_ended and not one.steps_in_flight]
        outputs: list[TokenOutput] = []
        place = 0
        for sequence in step.launched.sampling:
            if sequence.draft_ids:
                run = sampled[place : place + 1 + len(sequence.draft_ids)]
                outputs += self.accept_run(sequence, run)
                place += len(run)
                continue
            one, place = sampled[place], place + 1
            if sequence.has_bad_prompt_logprobs:
                one = Sampled(None)
            if one.token_id is None:
                sequence.has_bad_numbers = True
                self.blocks.unpublish(sequence)
            if not sequence.has_ended:
                outputs.append(self._advance(sequence, one))
        for sequence in leaving:
            self._release(sequence)
        return outputs

    def accept_run(self, sequence: Sequence, run: list[Sampled]) -> list[TokenOutput]:
        """Accept the tokens of a check, drawn as without drafts, up to the first that is not the draft in its place.

        What comes behind that one was drawn behind another token than it is, and counts for nothing. In a tree a token
        that is the draft of any branch goes on with that branch.
        """
        checked, sequence.draft_ids = sequence.draft_ids, []
        is_bad = any(one.token_id is None for one in run)
        if sequence.has_ended:  # while its step was in flight
            sequence.has_bad_numbers = sequence.has_bad_numbers or is_bad
            return []
        if is_bad:
            self._compute_without_drafts(sequence)
            return []
        outputs: list[TokenOutput] = []
        num_accepted, drafts = 0, checked
        if self.tree is not None:  # of the tree only the path that stands
            path = self.tree.accepted(checked, [one.token_id for one in run])
            self.runner.keep_drafts(sequence, path)
            drafts, run = [checked[node] for node in path], [run[0], *(run[1 + node] for node in path)]
        for one, draft in zip(run, [*drafts, None], strict=True):
            outputs.append(self._advance(sequence, one))
            num_accepted += one.token_id == draft
            if one.token_id != draft or sequence.has_ended:
                break
            self.scheduler.count_accepted(sequence)
            sequence.expect()
        if self.drafting is not None:
            self.drafting.count(sequence, checked, num_accepted)
        return outputs

    def end(self, sequence: Sequence) -> None:
        """End a request: no output follows. It keeps row and blocks while a step that writes to them is in flight."""
        del self.sequences[sequence.request.request_id]
        if self.drafting is not None:
            self.drafting.forget(sequence)
        sequence.has_ended = sequence.is_complete = True
        if not sequence.steps_in_flight:
            self._release(sequence)

    def _advance(self, sequence: Sequence, sampled: Sampled) -> TokenOutput:
        """Accept a sampled token and finish its sequence where it ends."""
        request_id, token_id = sequence.request.request_id, sampled.token_id
        if token_id is None:
            self.end(sequence)
            return TokenOutput(request_id, None, FinishReason.ERROR, error=RequestError.NOT_FINITE)
        prefill = sequence.prefill() if sequence.num_read_tokens == sequence.num_prompt_tokens else None
        sequence.accept(token_id)
        reason = self.ending.reason(sequence, token_id)
        if reason is not None:
            self.end(sequence)
        elif not sequence.num_unread_tokens and self.runner.must_recompute(sequence):
            self.scheduler.recompute(sequence)
            sequence.kv_variant = self.runner.kv_variant(len(sequence.token_ids))
        return TokenOutput(request_id, token_id, reason, sampled.logprobs, prefill)

    def _compute_without_drafts(self, sequence: Sequence) -> None:
        """Take back a check with numbers that are not finite: a draft's keys may have spoiled it, and are zeroed."""
        sequence.forget_expected()
        self.runner.zero_blocks(self.blocks.unpublish(sequence))
        self.scheduler.recompute(sequence)
        if self.drafting is not None:
            self.drafting.refuse(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.has_bad_numbers:
            self.runner.zero_blocks(self.blocks.unpublish(sequence))
        self.scheduler.remove(sequence)
