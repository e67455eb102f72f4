"""The longest run of tokens at the end of a text that stood in it before, by an index of its pairs of tokens.

    text            a b c x a b c y b c
    before, now               ^^^   ^^^
    longest run     b c, followed by y where it stood before

A run of two tokens or more ends with a pair that came before, so a text whose last pair is new has none: that is one
look into a table. Where the pair came before, its latest places are compared backwards. A run that goes on where the
last one stood is longer by the tokens that came, and nothing is searched.

A suffix automaton (Blumer et al. 1985; for drafts in SAM-Decoding, Hu et al. 2024, arXiv 2411.10666) finds the longest
run whatever the number of its places; the index takes a third of its memory, and a fifth of its time to read a prompt.
Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

MOST_RUN_TOKENS = 16  # that are compared: no check has more drafts, and a run has as many drafts as it is long
MOST_PLACES = 32  # of a pair, its latest: at most 0.1 ms
PAIR_TOKENS = 2
TOKEN_BITS = 32


class Match(NamedTuple):
    """A run at the end of a text that came before. `end`: the index behind its earlier place."""

    num_tokens: int
    end: int


NO_MATCH = Match(0, 0)


class RepeatedRuns:
    """Of one text, from `first` on. It grows with the text.

    Attributes:
        num_tokens: of the text that are read; those before `first` count, though no run is found there.
    """

    def __init__(self, first: int = 0) -> None:
        """`first`: the index of the first token that is read."""
        self.num_tokens = self._first = first
        self._latest: dict[int, int] = {}  # pair -> the index behind its latest place
        self._earlier: list[int] = []  # of each index behind a pair, that behind the same pair before; 0: none
        self._match, self._match_tokens = NO_MATCH, first  # the last one, and how many tokens were known then

    @property
    def num_indexed(self) -> int:
        """Tokens that take memory: 120 to 150 bytes each."""
        return self.num_tokens - self._first

    def read(self, token_ids: Seq[int], stop: int) -> None:
        """Read the text's tokens up to index `stop`."""
        latest, earlier, start = self._latest, self._earlier, max(self.num_tokens, self._first + 1)
        if stop > start:
            before = token_ids[start - 1]
            for end, token_id in enumerate(token_ids[start:stop], start + 1):
                pair = before << TOKEN_BITS | token_id
                earlier.append(latest.get(pair, 0))
                latest[pair] = end
                before = token_id
        self.num_tokens = max(self.num_tokens, stop)

    def match(self, token_ids: Seq[int]) -> Match:
        """Return the longest run of at least two tokens at the end of the text, all of which is read.

        Longer runs than MOST_RUN_TOKENS are equals; of equals the latest place counts. Of a pair with more places than
        MOST_PLACES the longest may be missed.
        """
        known = self.num_tokens
        if not self._earlier or not self._earlier[-1]:
            self._match = NO_MATCH
        else:
            self._match = self._going_on(token_ids, known) or self._searched(token_ids)
        self._match_tokens = known
        return self._match

    def _going_on(self, token_ids: Seq[int], known: int) -> Match | None:
        """The last match, longer by the tokens that came since; None where others came than did there."""
        num_tokens, end = self._match
        num_new = known - self._match_tokens
        if not num_tokens or token_ids[end : end + num_new] != token_ids[known - num_new : known]:
            return None
        return Match(num_tokens + num_new, end + num_new)

    def _searched(self, token_ids: Seq[int]) -> Match:
        found, end = NO_MATCH, self._earlier[-1]
        first_end, last = self._first + PAIR_TOKENS, self.num_tokens - 1
        for _ in range(MOST_PLACES):
            num_tokens, most = PAIR_TOKENS, min(MOST_RUN_TOKENS, end - self._first)
            while num_tokens < most and token_ids[end - 1 - num_tokens] == token_ids[last - num_tokens]:
                num_tokens += 1
            if num_tokens > found.num_tokens:
                found = Match(num_tokens, end)
                if num_tokens == MOST_RUN_TOKENS:
                    break
            end = self._earlier[end - first_end]
            if not end:
                break
        return found
