"""What a schedule found: how often each circumstance arose, and what is wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What is wrong."""

    TOKEN = "differing token"
    ANSWER = "answer that is otherwise wrong"  # its end, log-probabilities, order
    LEAK = "leak"
    CONTENTS = "cached block with other contents"
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class Wrong:
    """One defect that shows."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Difference:
    """A token that is not the one of the request alone, and perhaps as good: the first of its request."""

    request: int  # of the catalogue
    position: int  # in the answer
    found: int
    expected: int


@dataclass(slots=True)
class Findings:
    """Of one schedule."""

    wrong: list[Wrong] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)  # not judged yet
    near_ties: list[Difference] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    parameters: Counter[str] = field(default_factory=Counter)  # that compared requests asked for

    def add(self, kind: Kind, text: str) -> None:
        """Note a defect."""
        self.wrong.append(Wrong(kind, text))
