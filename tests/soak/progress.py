"""How far a long proof is: a line every few seconds, and one for each run that went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

Say = Callable[[str], None]
EVERY_SECONDS = 15.0


def silent(_text: str) -> None:
    """Print nothing."""


@dataclass
class Progress:
    """Counts runs. `total` may still grow while it counts."""

    say: Say = silent
    total: int = 0
    clock: Callable[[], float] = time.monotonic
    done: int = 0
    bad: int = 0
    _told: float = field(init=False)

    def __post_init__(self) -> None:
        self._told = self.clock()

    def step(self, what: str, problem: str = "") -> None:
        """One run has ended, with this problem."""
        self.done += 1
        if problem:
            self.bad += 1
            self.say(f"  {what}: {problem}")
        if problem or self.done == self.total or self.clock() - self._told >= EVERY_SECONDS:
            self._told = self.clock()
            self.say(f"  {self.done} of {self.total}, {self.bad} not as it should be")
