"""Drafters that know answers, and drafters that mean harm."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq

from millstream_runtime.engine.request import Request
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation.draft_lengths import K
from millstream_runtime.engine.speculation.reading_worth import Reading


class EachAlone:
    """Proposes for each request by itself: `guess(sequence, most)`."""

    def __init__(self, guess: Callable[[Sequence, int], Seq[int]]) -> None:
        self._guess = guess

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
        return {one: self._guess(one, most) for one, most in wanted.items()}

    def forget(self, sequence: Sequence) -> None:
        pass


class OftenRight(EachAlone):
    """Knows the answers of some prompts, and proposes a part of them: as they are, or with a mistake somewhere.

    Of what it does not know it proposes anything, also ids that no vocabulary has.
    """

    def __init__(self, answers: Mapping[tuple[int, ...], list[int]], vocab_size: int, seed: int = 0) -> None:
        super().__init__(self._often_right)
        self._answers, self._vocab_size, self._rng = answers, vocab_size, random.Random(seed)

    @classmethod
    def about(cls, requests: Iterable[Request], answers: Mapping[str, list[int]], vocab_size: int) -> OftenRight:
        """`answers`: by request id. Their prompts alone decide, so the same prompt under another id is known too."""
        known = {tuple(one.prompt_token_ids): answers[one.request_id] for one in requests}
        return cls(known, vocab_size)

    def _often_right(self, sequence: Sequence, most: int) -> list[int]:
        rng = self._rng
        answer = self._answers.get(tuple(sequence.request.prompt_token_ids), [])
        done = sequence.num_generated_tokens
        drafts = answer[done : done + rng.randint(0, most)]
        while len(drafts) < most and rng.random() < 0.5:
            drafts.append(rng.randrange(self._vocab_size))
        if drafts and rng.random() < 0.4:
            drafts[rng.randrange(len(drafts))] = rng.choice([-1, self._vocab_size, rng.randrange(self._vocab_size)])
        return drafts


def always_right(answers: Mapping[tuple[int, ...], list[int]]) -> EachAlone:
    """Proposes the whole answer, and more behind its end. `answers`: by prompt."""

    def guess(sequence: Sequence, most: int) -> list[int]:
        answer, done = answers[tuple(sequence.request.prompt_token_ids)], sequence.num_generated_tokens
        return [*answer[done:], *([0] * most)][:most]

    return EachAlone(guess)


def always(token_id: int) -> EachAlone:
    """Proposes the same token again and again."""
    return EachAlone(lambda sequence, most: [token_id] * most)


def always_wrong(answers: Mapping[tuple[int, ...], list[int]], vocab_size: int) -> EachAlone:
    """Proposes the tokens that do not come. `answers`: by prompt."""

    def guess(sequence: Sequence, most: int) -> list[int]:
        answer, done = answers[tuple(sequence.request.prompt_token_ids)], sequence.num_generated_tokens
        return [(token_id + 1) % vocab_size for token_id in answer[done : done + most]]

    return EachAlone(guess)


def failing(error: Exception) -> EachAlone:
    """Raises."""

    def guess(sequence: Sequence, most: int) -> list[int]:
        raise error

    return EachAlone(guess)


class RandomLengths:
    """A governor that flips at random: for some steps nothing is checked, for others any number of drafts.

    It begins with a step of all drafts and one of none: how many steps short answers take depends on measured times, so
    that chance alone might not flip before the last.
    """

    def __init__(self, seed: int = 0) -> None:
        self.explores = True
        self._rng, self._drafts = random.Random(seed), True
        self._num_steps = 0

    def choose(
        self,
        proposed: Mapping[K, int],
        num_decodes: int,
        *,
        is_crowded: bool,
        reading: Callable[[K], Reading] | None = None,
        num_coming: int = 0,
    ) -> dict[K, int]:
        if not any(proposed.values()):
            return {}
        self._num_steps += 1
        if self._num_steps <= 2:
            return {one: most for one, most in proposed.items() if most} if self._num_steps == 1 else {}
        if self._rng.random() < 0.2:
            self._drafts = not self._drafts
        lengths = {one: min(most, self._rng.randint(0, 2 * most)) for one, most in proposed.items()}
        return {one: length for one, length in lengths.items() if length and self._drafts}

    def observe_drafts(self, request: Hashable, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts

    def observe_step(self, num_decodes: int, num_drafts: int, num_tokens: int, seconds: float) -> None:
        assert seconds >= 0

    def observe_costs(self, num_decodes: int, num_drafts: int, seconds: float) -> None:
        assert seconds > 0

    def observe_reading(self, seconds: float) -> None:
        assert seconds >= 0

    def forget(self, request: Hashable) -> None:
        pass

    def stats(self) -> None:
        return None
