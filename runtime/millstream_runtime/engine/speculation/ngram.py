"""Drafts from the request itself: what followed when its last tokens came before (prompt lookup, Saxena 2023).

    known    ... the model has [ a window of 11 ] tokens ... the model has
    match        ^^^^^^^^^^^^^                               ^^^^^^^^^^^^^   the longest run at the end that came before
    drafts                       a window of 11

It costs no weights and a few microseconds per token, and pays where an answer repeats its prompt or itself: code that
is edited, documents that are quoted, a question that is asked again. Where the drafts reach the end of the known
tokens, they go on with the drafts themselves: a text that repeats goes on repeating.

A suffix automaton finds the longest run (as in SAM-Decoding, Hu et al. 2024, arXiv 2411.10666), and a run has as many
drafts as it is long: a short one comes up by chance (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975). Requests
for whose automaton there is no memory look up their last MATCH_TOKENS tokens. docs/speculation.md compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation.skip import Skip
from millstream_runtime.engine.speculation.suffix_automaton import SuffixAutomaton

LEAST_RUN_TOKENS = 2  # shorter runs come up by chance too often: a check that fails costs time
MOST_REQUEST_TOKENS = 1 << 15  # in an automaton: about 460 bytes each, in the worst case 620
MOST_TOKENS = 1 << 17  # in all automata
STEP_TOKENS = 1 << 11  # that automata read in one step: about 10 ms, for which the other requests wait
ALWAYS_TOKENS = 32  # read in every step: what a check and the steps without drafts may give

MATCH_TOKENS = 3  # of n-grams
MOST_INDEXED_TOKENS = 1 << 16  # of a prompt, its last ones: about 100 bytes each


class NGramIndex:
    """Where each run of MATCH_TOKENS tokens of one request stood last. It grows with the request."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # run of tokens -> the index behind it
        self._num_indexed: int | None = None  # ends up to this index are in

    def draft(self, token_ids: Seq[int], most: int) -> list[int]:
        """Return at most `most` tokens that may follow; none where the last tokens did not come before."""
        self._extend(token_ids)
        start = self._ends.get(tuple(token_ids[-MATCH_TOKENS:]))
        return [] if start is None else continued(token_ids, start, most)

    def _extend(self, token_ids: Seq[int]) -> None:
        """Add all runs but the last, which is what is looked for."""
        first = self._num_indexed
        if first is None:
            first = max(0, len(token_ids) - MOST_INDEXED_TOKENS) + MATCH_TOKENS
        for end in range(first, len(token_ids)):
            self._ends[tuple(token_ids[end - MATCH_TOKENS : end])] = end
        self._num_indexed = max(first, len(token_ids))


def continued(token_ids: Seq[int], start: int, num_tokens: int) -> list[int]:
    """Return `num_tokens` tokens from `start` on, with themselves behind the last one."""
    drafts = list(token_ids[start : start + num_tokens])
    period = len(token_ids) - start
    while len(drafts) < num_tokens:
        drafts.append(drafts[-period])
    return drafts


class NGramDrafter:
    """A `Drafter` with an automaton, or an index of n-grams, per request.

    Attributes:
        has_read_prompts: whether the last proposals took time to read what came before them.
    """

    is_free = True

    def __init__(self, most_request_tokens: int = MOST_REQUEST_TOKENS, most_tokens: int = MOST_TOKENS) -> None:
        """`most_request_tokens`, `most_tokens`: in the automaton of a request, and in all; others use n-grams."""
        self._most_request_tokens, self._most_tokens = most_request_tokens, most_tokens
        self._automata: dict[Sequence, SuffixAutomaton] = {}
        self._indexes: dict[Sequence, NGramIndex] = {}
        self._num_tokens = 0  # in all automata
        self.has_read_prompts = False

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int] | Skip]:
        """See `Drafter.propose`."""
        answer: dict[Sequence, Seq[int] | Skip] = {}
        self.has_read_prompts = False
        left = STEP_TOKENS
        for sequence, most in wanted.items():
            automaton = self._automaton(sequence)
            if automaton is None:
                answer[sequence] = self._indexes[sequence].draft(sequence.token_ids, most)
                continue
            num_read = self._read(automaton, sequence.token_ids, left)
            left -= num_read if num_read > ALWAYS_TOKENS else 0
            if automaton.num_tokens < len(sequence.token_ids):
                answer[sequence] = Skip.CATCHING_UP
            else:
                answer[sequence] = draft_of_longest_run(automaton, sequence.token_ids, most)
        return answer

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a request that has ended."""
        automaton = self._automata.pop(sequence, None)
        self._num_tokens -= 0 if automaton is None else automaton.num_tokens
        self._indexes.pop(sequence, None)

    def _automaton(self, sequence: Sequence) -> SuffixAutomaton | None:
        """Return the request's automaton; None where there is no memory for what it has to read: it has n-grams."""
        if sequence in self._indexes:
            return None
        automaton = self._automata.get(sequence)
        known = len(sequence.token_ids)
        num_unread = known if automaton is None else known - automaton.num_tokens
        if known > self._most_request_tokens or self._num_tokens + num_unread > self._most_tokens:
            self.forget(sequence)
            self._indexes[sequence] = NGramIndex()
            return None
        if automaton is None:
            automaton = self._automata[sequence] = SuffixAutomaton()
        return automaton

    def _read(self, automaton: SuffixAutomaton, token_ids: Seq[int], most: int) -> int:
        """Let it read unread tokens, at most `most`, or ALWAYS_TOKENS; return how many."""
        start = automaton.num_tokens
        read = token_ids[start : start + max(most, ALWAYS_TOKENS)]
        automaton.extend(read)
        self._num_tokens += len(read)
        self.has_read_prompts |= len(read) > ALWAYS_TOKENS
        return len(read)


def draft_of_longest_run(automaton: SuffixAutomaton, token_ids: Seq[int], most: int) -> list[int]:
    """Return what followed the longest run at the end of `token_ids`, which `automaton` has read, before.

    At most `most` tokens, and no more than the run has; none where it is too short.
    """
    num_tokens, end = automaton.match
    return continued(token_ids, end, min(most, num_tokens)) if num_tokens >= LEAST_RUN_TOKENS else []
