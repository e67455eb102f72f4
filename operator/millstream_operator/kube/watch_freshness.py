"""Does each watch still deliver? Known end to end, from the API server to the index, and not from the socket.

kopf asks for bookmarks and reconnects a stream that brought nothing for 70 seconds, but drops the bookmarks before
anybody else could see them (1.45), and a live socket would not show a stuck task or handler anyway. So every newer
state of an object that is learned by another way than the watch is a canary: the answer to our own write, a live GET,
or the whole listing of a resync. The watch of that kind must bring the same state, or a later one, too. The leader
makes a canary with each write; on a standby, and for kinds that it never writes, the resync finds them.

A canary that is overdue proves nothing yet: the API server may have been away, or the object may be gone with its
deletion never told (a watch that starts anew tells of what is, not of what went). So the object is asked for once
more. No answer: the count begins again. Gone: no matter. Still there, still not delivered: that watch is dead, and only
a restart helps. An idle watch is never suspected, and steady states cost no request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millstream_operator.kube.kinds import Kind

# More than kopf needs to find out by itself: 70 s of silence, a connection that times out, a back-off, a listing.
OVERDUE_SECONDS = 180.0


@dataclass(slots=True)
class Canary:
    """A state of an object that the API server has, so that its watch must bring it."""

    kind: Kind
    namespace: str
    name: str
    version: int
    since: float
    verified: bool = False  # asked for again when overdue: it is there

    def __str__(self) -> str:
        return f"{self.kind.kind} {self.namespace}/{self.name}"


class WatchFreshness:
    """Canaries by object. Times are seconds of one steady clock, given by the caller."""

    def __init__(self, kinds: Iterable[Kind], now: float, overdue_seconds: float = OVERDUE_SECONDS) -> None:
        self._fresh_at = dict.fromkeys(kinds, now)
        self._overdue_seconds = overdue_seconds
        self._canaries: dict[tuple[str, str, str], Canary] = {}

    def expect(self, kind: Kind, namespace: str, name: str, version: int, now: float) -> None:
        """This state exists; the first one that is waited for counts."""
        self._canaries.setdefault((kind.kind, namespace, name), Canary(kind, namespace, name, version, now))

    def delivered(self, kind: Kind, namespace: str, name: str, version: int, now: float) -> None:
        """The watch brought this state, or the deletion, of the object."""
        self._fresh_at[kind] = now
        canary = self._canaries.get((kind.kind, namespace, name))
        if canary is not None and version >= canary.version:
            del self._canaries[kind.kind, namespace, name]

    def listed(self, kind: Kind, present: set[tuple[str, str]], now: float) -> None:
        """A whole listing was compared with the index: canaries of what is gone end; without others all is well."""
        for key, canary in list(self._canaries.items()):
            if canary.kind is kind and key[1:] not in present:
                del self._canaries[key]
        if not any(canary.kind is kind for canary in self._canaries.values()):
            self._fresh_at[kind] = now

    def overdue(self, now: float) -> list[Canary]:
        """Those to ask for once more."""
        return [c for c in self._canaries.values() if not c.verified and now - c.since > self._overdue_seconds]

    def verify(self, canary: Canary, version: int | None) -> None:
        """The API server was asked again: the object's version now, or None when it is gone."""
        if version is None:
            self._canaries.pop((canary.kind.kind, canary.namespace, canary.name), None)
        else:
            canary.verified = True

    def excuse(self, canary: Canary, now: float) -> None:
        """The API server gave no answer: no watch could deliver."""
        canary.since = now

    def age_seconds(self, kind: Kind, now: float) -> float:
        """Since the watch last brought something, or was last found to miss nothing."""
        return now - self._fresh_at[kind]

    def dead(self, now: float) -> list[str]:
        """A sentence for each watch that is proved dead."""
        first: dict[str, Canary] = {}
        for canary in self._canaries.values():
            if canary.verified:
                first.setdefault(canary.kind.kind, canary)
        return [
            f"the watch of {kind} is dead: it has not brought {canary} in {now - canary.since:.0f} seconds"
            for kind, canary in first.items()
        ]
