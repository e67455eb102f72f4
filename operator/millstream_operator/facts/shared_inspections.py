"""Share one inspection among the LLMDeployments of a namespace that want the same model.

    the first one inspects; the others wait, are requeued by its answer, and store it as their own record

Answers are kept in memory for minutes only: a branch of a repository moves, and a spec that is applied tomorrow must
get tomorrow's commit. Nothing is lost with the process: an LLMDeployment without a record then inspects by itself.
Sharing stops at the namespace, because tokens and claims belong to it, and at another image, environment, token or
pull Secret (`sharing_key`): the author of one object must not choose the commit that another one serves. If the
inspecting one fails or goes silent, the next one inspects: its token may be valid.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.kube.index import OwnerKey

Manifest = dict[str, Any]
FRESH_SECONDS = 600.0  # for this long, an answer is shared
SILENT_SECONDS = 120.0  # an inspection without a sign of life for this long is no longer waited for


@dataclass(slots=True)
class _Inspection:
    """An inspection. `by`: the LLMDeployment that runs it. `at`: the last sign of life."""

    by: OwnerKey
    at: float
    answer: Manifest | None = None
    waiting: set[OwnerKey] = field(default_factory=set)


class SharedInspections:
    """The inspections of one process. `wake` requeues a key at once."""

    def __init__(self, wake: Callable[[OwnerKey], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._wake, self._clock = wake, clock
        self._inspections: dict[tuple[str, str], _Inspection] = {}  # by namespace and sharing key

    def answer(self, name: str, me: OwnerKey) -> Manifest | None:
        """Return a recent answer of another LLMDeployment. One that lost its own record inspects again."""
        known = self._inspections.get((me.namespace, name))
        if known is None or known.by == me or self._clock() - known.at > FRESH_SECONDS:
            return None
        return known.answer

    def asked_by(self, name: str, me: OwnerKey) -> OwnerKey | None:
        """Return the LLMDeployment that inspects now, other than `me`; `me` is requeued when it ends."""
        known = self._inspections.get((me.namespace, name))
        if known is None or known.by == me or known.answer is not None:
            return None
        if self._clock() - known.at > SILENT_SECONDS:
            return None
        known.waiting.add(me)
        return known.by

    def asking(self, name: str, me: OwnerKey) -> None:
        """Record that `me` inspects, without a failure so far."""
        known = self._inspections.get((me.namespace, name))
        waiting = known.waiting if known is not None else set()
        self._inspections[me.namespace, name] = _Inspection(me, self._clock(), waiting=waiting - {me})

    def failed(self, name: str, me: OwnerKey) -> None:
        """Record that `me` failed: the others inspect by themselves."""
        known = self._inspections.get((me.namespace, name))
        if known is not None and known.by == me and known.answer is None:
            del self._inspections[me.namespace, name]
            self._wake_waiting(known)

    def answered(self, name: str, me: OwnerKey, answer: Manifest) -> None:
        """Record the answer, and requeue those that wait for it."""
        now = self._clock()
        for key in [key for key, one in self._inspections.items() if now - one.at > FRESH_SECONDS]:
            del self._inspections[key]
        known = self._inspections.get((me.namespace, name))
        self._inspections[me.namespace, name] = _Inspection(me, now, answer)
        if known is not None:
            self._wake_waiting(known)

    def forget(self, me: OwnerKey) -> None:
        """Forget a deleted LLMDeployment and its inspections."""
        for name in [name for (namespace, name), one in self._inspections.items() if one.by == me]:
            self.failed(name, me)

    def _wake_waiting(self, known: _Inspection) -> None:
        for key in known.waiting:
            self._wake(key)
