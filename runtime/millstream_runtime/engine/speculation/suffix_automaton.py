"""The longest run of tokens at the end of a text that stood in it before: a suffix automaton (Blumer et al. 1985).

    text            a b c x a b c y b c
    before, now               ^^^   ^^^
    longest run     b c, followed by y where it stood before

A state stands for the runs of tokens that end at the same places. Its link leads to the state of the longest suffix
that ends at more places. The text as a whole is a state, so the link of that state is the longest run at the end that
came before. Adding a token takes constant time, amortised, and adds at most two states. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MOST_RENEWED_STATES = 8  # per token


class Match(NamedTuple):
    """A run at the end of a text that came before. `end`: the index behind its earlier place."""

    num_tokens: int
    end: int


class SuffixAutomaton:
    """See above.

    Attributes:
        match: the longest run at the end that came before; of 0 tokens where there is none.
    """

    def __init__(self, most_renewed_states: int = MOST_RENEWED_STATES) -> None:
        """`most_renewed_states`: per token; see `extend`."""
        self._most_renewed_states = most_renewed_states
        self.match = Match(0, 0)
        self._last = 0  # the state of the whole text; state 0 is the empty run's
        # By state:
        self._next: list[dict[int, int]] = [{}]  # token -> the state of the runs that it makes longer
        self._num_tokens = [0]  # of the longest run
        self._link = [-1]
        self._end = [0]  # the index behind the latest known place of its runs

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return self._num_tokens[self._last]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add the next tokens of the text.

        One repeated token has as many runs that end the text as it has tokens. So only the longest of them are noted to
        stand at the end, `most_renewed_states`; a shorter one may have an earlier place than its latest.
        """
        # A prompt is read token by token between two steps: one loop over local names takes half the time of calls.
        following, lengths, links, ends = self._next, self._num_tokens, self._link, self._end
        last, match, most_renewed_states = (
            self._last,
            (self.match.num_tokens, self.match.end),
            self._most_renewed_states,
        )
        for token_id in token_ids:
            new, end = len(links), lengths[last] + 1
            following.append({})
            lengths.append(end)
            links.append(0)
            ends.append(end)
            at = last
            while at >= 0 and token_id not in (of := following[at]):
                of[token_id] = new
                at = links[at]
            longest = 0 if at < 0 else self._exactly(at, token_id)
            links[new], last = longest, new
            match = (lengths[longest], ends[longest])
            for _ in range(1, most_renewed_states):
                if not longest:
                    break
                ends[longest] = end
                longest = links[longest]
        self._last, self.match = last, Match(*match)

    def _exactly(self, before: int, token_id: int) -> int:
        """Return the state whose longest run is that of `before` and the token.

        Where they lead to a state with longer runs, which do not end here, the shorter ones get a state apart.
        """
        found, num_tokens = self._next[before][token_id], self._num_tokens[before] + 1
        if self._num_tokens[found] == num_tokens:
            return found
        apart = self._add(dict(self._next[found]), num_tokens)
        self._link[apart], self._end[apart] = self._link[found], self._end[found]
        self._link[found] = apart
        while before >= 0 and self._next[before].get(token_id) == found:
            self._next[before][token_id] = apart
            before = self._link[before]
        return apart

    def _add(self, following: dict[int, int], num_tokens: int) -> int:
        self._next.append(following)
        self._num_tokens.append(num_tokens)
        self._link.append(0)
        self._end.append(0)
        return len(self._next) - 1
