"""Drafts from the request itself: what followed when its last tokens came before (prompt lookup, Saxena 2023).

    known    ... the model has [ a window of 11 ] tokens ... the model has
    match        ^^^^^^^^^^^^^                               ^^^^^^^^^^^^^   the last MATCH_TOKENS tokens
    drafts                       a window of 11

It costs no weights and a few microseconds, and pays where an answer repeats its prompt or itself: code that is edited,
documents that are quoted, a question that is asked again. Of several places the latest counts. Where the drafts reach
the end of the known tokens, they go on with the drafts themselves: a text that repeats goes on repeating.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from millstream_runtime.engine.scheduling.sequence import Sequence

MATCH_TOKENS = 3  # fewer come up by chance too often: a check that fails costs time
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
        if start is None:
            return []
        drafts = list(token_ids[start : start + most])
        period = len(token_ids) - start
        while len(drafts) < most:
            drafts.append(drafts[-period])
        return drafts

    def _extend(self, token_ids: Seq[int]) -> None:
        """Add all runs but the last, which is what is looked for."""
        first = self._num_indexed
        if first is None:
            first = max(0, len(token_ids) - MOST_INDEXED_TOKENS) + MATCH_TOKENS
        for end in range(first, len(token_ids)):
            self._ends[tuple(token_ids[end - MATCH_TOKENS : end])] = end
        self._num_indexed = max(first, len(token_ids))


class NGramDrafter:
    """A `Drafter` with an index per request."""

    is_free = True

    def __init__(self) -> None:
        self._indexes: dict[Sequence, NGramIndex] = {}

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int]]:
        """See `Drafter.propose`."""
        drafts = {}
        for sequence, most in wanted.items():
            index = self._indexes.get(sequence)
            if index is None:
                index = self._indexes[sequence] = NGramIndex()
            drafts[sequence] = index.draft(sequence.token_ids, most)
        return drafts

    def forget(self, sequence: Sequence) -> None:
        """Drop the index of a request that has ended."""
        self._indexes.pop(sequence, None)
