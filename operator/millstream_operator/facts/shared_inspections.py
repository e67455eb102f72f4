"""One inspection for all who want the same model of the same namespace: fifty LLMDeployments of one model ask once.

    the first to want it asks; the others wait, are woken by its answer, and write it down as their own

Kept in memory, and only for minutes: a branch of a repository moves, and a spec that is applied tomorrow is to find
what is there tomorrow. Nothing is lost with the process; whoever has no record then asks by itself. The namespace is
the bound, because tokens and claims are its own. If the one that asks fails or falls silent, the next one asks: its
token may be a better one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.kube.index import OwnerKey

Manifest = dict[str, Any]
FRESH_SECONDS = 600.0  # an answer is somebody else's answer, too
SILENT_SECONDS = 120.0  # who was not heard of for so long is no longer waited for


@dataclass(slots=True)
class _Asked:
    """A model that is asked about. `by`: whoever asks, or was answered. `at`: when it was heard of last."""

    by: OwnerKey
    at: float
    answer: Manifest | None = None
    waiting: set[OwnerKey] = field(default_factory=set)


class SharedInspections:
    """For one process. `wake` brings a key back at once."""

    def __init__(self, wake: Callable[[OwnerKey], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._wake, self._clock = wake, clock
        self._asked: dict[tuple[str, str], _Asked] = {}  # by namespace and inspection key

    def answer(self, name: str, me: OwnerKey) -> Manifest | None:
        """What somebody else was answered a short while ago. Whoever lost its own record asks anew."""
        known = self._asked.get((me.namespace, name))
        if known is None or known.by == me or self._clock() - known.at > FRESH_SECONDS:
            return None
        return known.answer

    def asked_by(self, name: str, me: OwnerKey) -> OwnerKey | None:
        """Whoever else asks at the moment; then `me` is woken by the answer, or when there will be none."""
        known = self._asked.get((me.namespace, name))
        if known is None or known.by == me or known.answer is not None:
            return None
        if self._clock() - known.at > SILENT_SECONDS:
            return None
        known.waiting.add(me)
        return known.by

    def asking(self, name: str, me: OwnerKey) -> None:
        """`me` asks, and has heard nothing bad so far."""
        known = self._asked.get((me.namespace, name))
        waiting = known.waiting if known is not None else set()
        self._asked[me.namespace, name] = _Asked(me, self._clock(), waiting=waiting - {me})

    def failed(self, name: str, me: OwnerKey) -> None:
        """`me` was not answered: the others ask by themselves."""
        known = self._asked.get((me.namespace, name))
        if known is not None and known.by == me and known.answer is None:
            del self._asked[me.namespace, name]
            self._wake_all(known)

    def answered(self, name: str, me: OwnerKey, answer: Manifest) -> None:
        """It is known now."""
        now = self._clock()
        for key in [key for key, one in self._asked.items() if now - one.at > FRESH_SECONDS]:
            del self._asked[key]
        known = self._asked.get((me.namespace, name))
        self._asked[me.namespace, name] = _Asked(me, now, answer)
        if known is not None:
            self._wake_all(known)

    def forget(self, me: OwnerKey) -> None:
        """`me` is gone, and whatever it asked with it."""
        for name in [name for (namespace, name), one in self._asked.items() if one.by == me]:
            self.failed(name, me)

    def _wake_all(self, known: _Asked) -> None:
        for key in known.waiting:
            self._wake(key)
