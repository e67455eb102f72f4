"""Which requests are asked for drafts where asking is free but for its time: not each of them in each step.

A text that came upon nothing it said before will seldom do so with its next token, and looking costs time all the same,
the more as a step of the model has emptied the processor's caches meanwhile. So a request for which nothing was
proposed in QUIET_STEPS looks in a row is looked at in one step of LOOK_EVERY_STEPS, the same for all such requests: the
other steps cost nothing, and where a request begins to repeat itself it has its drafts up to three tokens later. Pure:
no torch, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import TypeVar

QUIET_STEPS = 32
LOOK_EVERY_STEPS = 4

K = TypeVar("K", bound=Hashable)  # a request


class QuietRequests:
    """See above."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._looks_in_vain: dict[Hashable, int] = {}  # in a row

    def to_ask(self, decodes: list[K]) -> list[K]:
        """Return those of the next step's decodes that are to be asked for drafts."""
        self._num_steps += 1
        if self._num_steps % LOOK_EVERY_STEPS == 0:
            return decodes
        looks = self._looks_in_vain
        return [one for one in decodes if looks.get(one, 0) < QUIET_STEPS]

    def observe(self, asked: Collection[K], proposed: Collection[K]) -> None:
        """Learn for which of the requests that were asked something was proposed."""
        looks = self._looks_in_vain
        for one in asked:
            looks[one] = 0 if one in proposed else looks.get(one, 0) + 1

    def forget(self, request: Hashable) -> None:
        """The request has ended."""
        self._looks_in_vain.pop(request, None)
