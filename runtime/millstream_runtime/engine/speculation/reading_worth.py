"""Whether a draft model should read a prompt at all. Pure: no torch, no clock.

    reading takes       tokens not read * seconds per token             once per request
    drafts then save    seconds per token * tokens still to come

Requests whose reading takes longer than their drafts save cost time, though every step with drafts is faster than one
without: a long prompt with a short answer, or any prompt where drafts save little, as in a large batch. A pass of the
draft model takes nearly as long for one request as for a batch, so batches of which only a part drafts are slower than
either all or none. So requests of which none is read yet are judged together, those with the best ratio first
(`worth_reading`), and one that comes to others that draft by what reading took of those before it (`ReadingPrice`).

How many tokens are to come is not known: the mean of the answers before it is taken; of one that is longer than that
already, as many more as it has.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeVar

from millstream_runtime.engine.speculation.catching_up import CHUNK_SECONDS
from millstream_runtime.engine.speculation.goodput import best_goodput, lengths_from, likeliest_first

NEW_SHARE = 0.1  # of what is known of answers and prompts, by the latest one

K = TypeVar("K", bound=Hashable)  # a request


class Reading(NamedTuple):
    """What a request costs before it has drafts, and for how long it may have some.

    Attributes:
        seconds: in which a draft model reads what it has not read of it; 0 where that is little.
        coming_tokens: that are expected of its answer.
        answer_tokens: of answers, on average; each token ends one with the chance 1 / `answer_tokens`.
    """

    seconds: float
    coming_tokens: float
    answer_tokens: float = math.inf


def before_the_end(marginals: Seq[float], answer_tokens: float) -> list[float]:
    """Return the chances that drafts stand and that the answer has not ended before them; see `Reading`.

    The last check of each answer is cut short, so without this drafts of short answers look a tenth better than they
    are.
    """
    goes_on, still = 1 - 1 / max(answer_tokens, 1.0), 1.0
    found = []
    for one in marginals:
        still *= goes_on
        found.append(one * still)
    return found


def worth_reading(unread: Mapping[K, Reading], saved_seconds_per_token: float) -> set[K]:
    """Return the most requests whose drafts, together, save what reading them takes. Those that end last and are read
    soonest come first."""

    def seconds_per_token(one: K) -> float:
        return unread[one].seconds / max(unread[one].coming_tokens, 1.0)

    worth: set[K] = set()
    left_seconds = reading_seconds = 0.0
    for one in sorted(unread, key=seconds_per_token):
        seconds, coming_tokens, _ = unread[one]
        reading_seconds += seconds
        without_drafts = reading_seconds / CHUNK_SECONDS  # tokens that come, one per step, until it is its turn
        left_seconds += saved_seconds_per_token * max(0.0, coming_tokens - without_drafts) - seconds
        if left_seconds < 0:
            break
        worth.add(one)
    return worth


def worth_drafting(
    marginals: Mapping[K, list[float]], num_decodes: int, seconds: Seq[float], unread: Mapping[K, Reading]
) -> Mapping[K, list[float]]:
    """Leave out the requests that are not worth reading, where none of them is read yet.

    What drafts save follows from all requests that draft, so it is found anew until none more is left out.

    Args:
        marginals: of the drafts of each request.
        num_decodes: requests of the step, also those without drafts.
        seconds: see `best_goodput`.
    """
    while True:
        likeliest = likeliest_first(marginals)
        best = best_goodput(num_decodes, likeliest, seconds)
        if not best.num_drafts:
            return marginals
        drafting = lengths_from(marginals, likeliest[best.num_drafts - 1])
        # Of the tokens of a step, those of requests that draft: what the step saves ends with them.
        tokens = best.tokens - (num_decodes - len(drafting))
        saved_seconds = best.tokens * seconds[0] / num_decodes - best.seconds
        unworthy = drafting.keys() - worth_reading({one: unread[one] for one in drafting}, saved_seconds / tokens)
        if not unworthy:
            return marginals
        marginals = {one: of for one, of in marginals.items() if one not in unworthy}


class ReadingPrice:
    """What reading takes, as seconds per token of the answers: of the requests that came lately."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0
        self._seen: set[Hashable] = set()

    @property
    def seconds_per_token(self) -> float:
        """0 where none was seen."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def observe(self, found: Mapping[K, Reading], plain_seconds_per_token: float) -> None:
        """Learn of the requests that were not seen before. Those that take longer to read than without any drafts are
        never read, so they are no part of it."""
        for one, (seconds, coming_tokens, _) in found.items():
            if one in self._seen:
                continue
            self._seen.add(one)
            if seconds <= plain_seconds_per_token * coming_tokens:
                self._seconds = (1 - NEW_SHARE) * self._seconds + seconds
                self._tokens = (1 - NEW_SHARE) * self._tokens + coming_tokens

    def forget(self, request: Hashable) -> None:
        """The request has ended."""
        self._seen.discard(request)


class AnswerLengths:
    """How many tokens answers have."""

    def __init__(self) -> None:
        self._mean_tokens: float | None = None

    def observe_answer(self, num_tokens: int) -> None:
        """Learn how many tokens an answer had when it ended."""
        known = self._mean_tokens
        self._mean_tokens = num_tokens if known is None else (1 - NEW_SHARE) * known + NEW_SHARE * num_tokens

    @property
    def mean_tokens(self) -> float:
        """Infinite before the first answer has ended."""
        return math.inf if self._mean_tokens is None else self._mean_tokens

    def expected_tokens(self, num_generated: int, most: int) -> float:
        """How many more tokens will come. `most`: as the request allows."""
        if self._mean_tokens is None:
            return most
        return min(most, max(self._mean_tokens - num_generated, num_generated))
