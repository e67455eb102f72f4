"""Requests that repeat nothing are seldom asked for drafts, and have them soon after they begin to repeat."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import pytest

from millstream_runtime.config import GovernorMode
from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation import ngram
from millstream_runtime.engine.speculation.drafting import Drafting
from millstream_runtime.engine.speculation.ngram import NGramDrafter
from millstream_runtime.engine.speculation.quiet_requests import LOOK_EVERY_STEPS, QUIET_STEPS
from millstream_runtime.engine.speculation.skip import Skip

NEW_TOKENS = 200


class Counted(NGramDrafter):
    """Counts how often each request is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int] | Skip]:
        self.asked += [one.request.request_id for one in wanted]
        return super().propose(wanted)


def decode(name: str, *tokens: int) -> Sequence:
    sequence = Sequence(Request(name, tokens, SamplingParams(max_tokens=1000)), 0, 1, [*tokens], len(tokens))
    sequence.num_computed_tokens = len(tokens) - 1
    return sequence


def give(sequence: Sequence, token_id: int) -> None:
    sequence.append(token_id)
    sequence.num_computed_tokens += 1


def drafting(drafter: NGramDrafter) -> Drafting:
    return Drafting(drafter, 4, 10_000, lambda sequence: 100, GovernorMode.DISABLED)


def test_a_request_that_repeats_nothing_is_asked_in_one_step_of_four() -> None:
    drafter = Counted()
    drafts, sequence = drafting(drafter), decode("new", 1, 2, 3)
    for token_id in range(NEW_TOKENS):
        assert drafts.propose([sequence]) == {}
        give(sequence, 10 + token_id)
    assert len(drafter.asked) == QUIET_STEPS + (NEW_TOKENS - QUIET_STEPS) // LOOK_EVERY_STEPS
    assert drafts.stats().skipped[Skip.NO_PROPOSAL.value] == NEW_TOKENS, "a step in which it is not asked counts, too"


def test_it_has_drafts_at_most_three_tokens_after_it_begins_to_repeat_itself() -> None:
    for num_quiet in range(NEW_TOKENS, NEW_TOKENS + LOOK_EVERY_STEPS):
        drafts, sequence = drafting(NGramDrafter()), decode("new", 1, 2, 3)
        for token_id in range(num_quiet):
            drafts.propose([sequence])
            give(sequence, 10 + token_id)
        steps = 0
        for token_id in range(10, 60):  # the answer from its beginning
            give(sequence, token_id)
            steps += 1
            if proposed := drafts.propose([sequence]):
                break
        assert proposed[sequence][0] == 10 + steps
        assert steps <= 2 + LOOK_EVERY_STEPS - 1, "a run has two tokens"
        give(sequence, 10 + steps)
        assert drafts.propose([sequence]), "from then on it is asked in every step"


def test_one_that_repeats_itself_has_drafts_in_every_step_among_quiet_ones() -> None:
    drafter = Counted()
    drafts, quiet, repeating = drafting(drafter), decode("new", 1, 2, 3), decode("again", *(5, 6, 7) * 3)
    for step in range(100):
        assert drafts.propose([quiet, repeating])[repeating] == [5 + (step + place) % 3 for place in range(4)]
        give(quiet, 10 + step)
        give(repeating, 5 + step % 3)
    assert drafter.asked.count("again") == 100
    assert drafter.asked.count("new") < 60


def test_a_request_whose_prompt_is_still_read_is_not_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "STEP_TOKENS", 0)  # and ALWAYS_TOKENS are read in each step
    drafter = Counted()
    drafts, sequence = drafting(drafter), decode("long", *range(2 * QUIET_STEPS * ngram.ALWAYS_TOKENS))
    for _ in range(2 * QUIET_STEPS):
        drafts.propose([sequence])
    assert len(drafter.asked) == 2 * QUIET_STEPS
    assert drafts.stats().skipped[Skip.CATCHING_UP.value] == 2 * QUIET_STEPS - 1


def test_a_request_with_the_id_of_one_that_ended_is_asked_from_its_first_step() -> None:
    drafter = Counted()
    drafts, sequence = drafting(drafter), decode("new", 1, 2, 3)
    for token_id in range(NEW_TOKENS):
        drafts.propose([sequence])
        give(sequence, 10 + token_id)
    drafts.forget(sequence)
    drafter.asked.clear()
    again = decode("new", 1, 2, 3)
    for token_id in range(LOOK_EVERY_STEPS):
        drafts.propose([again])
        give(again, 10 + token_id)
    assert len(drafter.asked) == LOOK_EVERY_STEPS
