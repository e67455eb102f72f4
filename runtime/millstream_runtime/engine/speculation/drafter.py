"""Where drafts come from: the interface of every source of them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.speculation.skip import Skip


class Drafter(Protocol):
    """Guesses the next tokens of requests. A wrong guess costs time and changes no token.

    One that raises is not asked again, unless there was no memory, nor is one that gives NaN
    (`Skip.DRAFT_NOT_FINITE`) for several requests in a row (`drafting.MOST_NOT_FINITE_REQUESTS`). All calls come from
    the engine's thread. One whose proposals cost next to nothing has an attribute `is_free` that is true: it is asked
    before it is known how many of them are checked. One that reads prompts has an attribute `has_read_prompts`: whether
    it did when it was asked last, and a method `reading_seconds(sequence)`: what reading takes before it has drafts.
    """

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Seq[int] | Skip]:
        """Return tokens that may follow the known ones of each sequence: at most `wanted` of it, none where there is
        no good guess, or the reason why there are none. All its known tokens are read."""

    def forget(self, sequence: Sequence) -> None:
        """The request has ended. One that was never asked about is no error."""
