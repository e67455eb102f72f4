"""Drafts from the request itself: what followed when its last tokens came before (prompt lookup, Saxena 2023).

    known    ... the model has [ a window of 11 ] tokens ... the model has
    match        ^^^^^^^^^^^^^                               ^^^^^^^^^^^^^   the longest run at the end that came before
    drafts                       a window of 11

It costs no weights and a few microseconds per token, and pays where an answer repeats its prompt or itself: code that
is edited, documents that are quoted, a question that is asked again. Where the drafts reach the end of the known
tokens, they go on with the drafts themselves: a text that repeats goes on repeating.

A run has as many drafts as it is long: a short one comes up by chance (SuffixDecoding, Oliaro et al. 2024, arXiv
2411.04975). docs/speculation.md compares that with n-grams of a fixed length.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation.repeated_runs import RepeatedRuns
from millstream_runtime.engine.speculation.skip import Skip

MOST_REQUEST_TOKENS = 1 << 16  # of a request that is seen for the first time, its last ones
MOST_TOKENS = 1 << 19  # of all requests together: 80 MB
LEAST_REQUEST_TOKENS = 1 << 10  # the same of a request for which there is no room
STEP_TOKENS = 1 << 13  # that are read in one step: a few milliseconds, for which the other requests wait
ALWAYS_TOKENS = 32  # read in every step: what a check and the steps without drafts may give


class NGramDrafter:
    """A `Drafter` with an index of each request's runs.

    Attributes:
        has_read_prompts: whether the last proposals took time to read what came before them.
    """

    is_free = True

    def __init__(self, most_request_tokens: int = MOST_REQUEST_TOKENS, most_tokens: int = MOST_TOKENS) -> None:
        """`most_request_tokens`, `most_tokens`: of one request, and of all, when a request is seen first."""
        self._most_request_tokens, self._most_tokens = most_request_tokens, most_tokens
        self._runs: dict[Sequence, RepeatedRuns] = {}
        self._num_tokens = 0  # of all requests
        self.has_read_prompts = False

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int] | Skip]:
        """See `Drafter.propose`."""
        answer: dict[Sequence, Seq[int] | Skip] = {}
        self.has_read_prompts = False
        left = STEP_TOKENS
        for sequence, most in wanted.items():
            token_ids = sequence.token_ids
            known = len(token_ids)
            runs = self._runs.get(sequence) or self._begin(sequence, known)
            num_unread = known - runs.num_tokens
            num_read = min(num_unread, max(left, ALWAYS_TOKENS))
            runs.read(token_ids, runs.num_tokens + num_read)
            self._num_tokens += num_read
            if num_read > ALWAYS_TOKENS:
                left -= num_read
                self.has_read_prompts = True
            answer[sequence] = drafts_of(runs, token_ids, most) if num_read == num_unread else Skip.CATCHING_UP
        return answer

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a request that has ended."""
        runs = self._runs.pop(sequence, None)
        self._num_tokens -= 0 if runs is None else runs.num_indexed

    def _begin(self, sequence: Sequence, known: int) -> RepeatedRuns:
        """Of a long request the last tokens are read, as many as there is room for."""
        room = max(LEAST_REQUEST_TOKENS, self._most_tokens - self._num_tokens)
        first = max(0, known - min(self._most_request_tokens, room))
        runs = self._runs[sequence] = RepeatedRuns(first)
        return runs


def drafts_of(runs: RepeatedRuns, token_ids: Seq[int], most: int) -> Seq[int]:
    """Return what followed the longest run at the end of `token_ids`, all read, where it stood before.

    At most `most` tokens, and no more than the run has; none where it came up nowhere.
    """
    num_tokens, end = runs.match(token_ids)
    return continued(token_ids, end, min(most, num_tokens)) if num_tokens else ()


def continued(token_ids: Seq[int], start: int, num_tokens: int) -> list[int]:
    """Return `num_tokens` tokens from `start` on, with themselves behind the last one."""
    drafts = list(token_ids[start : start + num_tokens])
    period = len(token_ids) - start
    while len(drafts) < num_tokens:
        drafts.append(drafts[-period])
    return drafts
