"""Whether each watch still delivers, checked end to end from the API server to the index.

kopf requests bookmarks and reconnects a stream that was silent for 70 seconds, but drops the bookmarks before a handler
sees them (1.45), and a live socket would not reveal a stuck task or handler. So every newer state of an object that
comes from another source than the watch is a canary: the answer to our own write, a live GET, or the listing of a
resync. The watch of that kind must deliver the same state, or a later one. The leader makes a canary with each write;
on a standby, and for kinds that it never writes, the resync finds them.

An overdue canary proves nothing yet: the API server may have been away, or the object may be gone without a DELETED
event (a watch that starts again sends what exists, not what went). So the object is read once more. No answer: the
count begins again. Gone: the canary ends. Still there and still not delivered: that watch is dead, and only a restart
helps. An idle watch is never suspected, and a steady state costs no request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millstream_operator.kube.kinds import Kind

# More than kopf needs to find out by itself: 70 s of silence, a connection that times out, a back-off, a listing.
OVERDUE_SECONDS = 180.0


@dataclass(slots=True)
class Canary:
    """A state of an object that the API server has, so that its watch must deliver it."""

    kind: Kind
    namespace: str
    name: str
    version: int
    since: float
    verified: bool = False  # read again when overdue, and it was there

    def __str__(self) -> str:
        return f"{self.kind.kind} {self.namespace}/{self.name}"


class WatchFreshness:
    """Canaries by object. Times are seconds of one steady clock, given by the caller."""

    def __init__(self, kinds: Iterable[Kind], now: float, overdue_seconds: float = OVERDUE_SECONDS) -> None:
        self._fresh_at = dict.fromkeys(kinds, now)
        self._overdue_seconds = overdue_seconds
        self._canaries: dict[tuple[str, str, str], Canary] = {}

    def expect(self, kind: Kind, namespace: str, name: str, version: int, now: float) -> None:
        """Expect this state from the watch. An earlier expectation for the object stays."""
        self._canaries.setdefault((kind.kind, namespace, name), Canary(kind, namespace, name, version, now))

    def delivered(self, kind: Kind, namespace: str, name: str, version: int, now: float) -> None:
        """The watch delivered this state, or the deletion, of the object."""
        self._fresh_at[kind] = now
        canary = self._canaries.get((kind.kind, namespace, name))
        if canary is not None and version >= canary.version:
            del self._canaries[kind.kind, namespace, name]

    def listed(self, kind: Kind, present: set[tuple[str, str]], now: float) -> None:
        """A whole listing was compared with the index: end the canaries of objects that are gone."""
        for key, canary in list(self._canaries.items()):
            if canary.kind is kind and key[1:] not in present:
                del self._canaries[key]
        if not any(canary.kind is kind for canary in self._canaries.values()):
            self._fresh_at[kind] = now

    def overdue(self, now: float) -> list[Canary]:
        """Return the canaries to read once more."""
        return [c for c in self._canaries.values() if not c.verified and now - c.since > self._overdue_seconds]

    def verify(self, canary: Canary, version: int | None) -> None:
        """Record a second read: the object's version now, or None when it is gone."""
        if version is None:
            self._canaries.pop((canary.kind.kind, canary.namespace, canary.name), None)
        else:
            canary.verified = True

    def excuse(self, canary: Canary, now: float) -> None:
        """Restart the count: the API server gave no answer, so no watch could deliver."""
        canary.since = now

    def age_seconds(self, kind: Kind, now: float) -> float:
        """Return the seconds since the watch last delivered something, or last missed nothing."""
        return now - self._fresh_at[kind]

    def dead(self, now: float) -> list[str]:
        """Return a sentence for each watch that is proved dead."""
        first: dict[str, Canary] = {}
        for canary in self._canaries.values():
            if canary.verified:
                first.setdefault(canary.kind.kind, canary)
        return [
            f"the watch of {kind} is dead: it has not delivered {canary} in {now - canary.since:.0f} seconds"
            for kind, canary in first.items()
        ]
