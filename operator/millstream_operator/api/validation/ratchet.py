"""One rule for what is new, in CEL and in Python. `validation/ratchets.py` has them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ratchet:
    """`holds` is asked of a new value at `path`.

    `cel`: the same, or that the stored value breaks it already; None where the API server cannot ask it within its
    budget.
    `shown`: the part of the value that the message of `millstream validate` shows; None: the whole.
    `message_of`, `message_cel`: where given, the message of a value, which names a part of it, in Python and in CEL.
    """

    path: str
    cel: str | None
    holds: Callable[[Any], bool]
    message: str
    shown: Callable[[Any], Any] | None = None
    message_of: Callable[[Any], str] | None = None
    message_cel: str | None = None
