"""The API server's own record of who wrote what, and when. Pure, but for the reading."""

from __future__ import annotations

import bisect
import datetime
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Write:
    """One write that the API server carried out. Times are seconds since the epoch, of one clock."""

    agent: str
    verb: str
    resource: str
    namespace: str
    name: str
    status: int
    received: float
    answered: float

    @property
    def about_lease(self) -> bool:
        return self.resource == "leases"


def read(path: Path) -> Iterator[Write]:
    """Writes in the order of the log."""
    with path.open() as lines:
        for line in lines:
            event = json.loads(line)
            what = event.get("objectRef") or {}
            yield Write(
                agent=event.get("userAgent", ""),
                verb=event["verb"],
                resource="/".join(filter(None, (what.get("resource", ""), what.get("subresource", "")))),
                namespace=what.get("namespace", ""),
                name=what.get("name", ""),
                status=(event.get("responseStatus") or {}).get("code", 0),
                received=_seconds(event["requestReceivedTimestamp"]),
                answered=_seconds(event["stageTimestamp"]),
            )


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


@dataclass(frozen=True, slots=True)
class Term:
    """From a replica's first write of the Lease to the next one's."""

    agent: str
    asked: float
    granted: float


def terms(writes: Iterable[Write]) -> list[Term]:
    """Who held the Lease, one after the other."""
    found: list[Term] = []
    for write in sorted((w for w in writes if w.about_lease and w.status < 300), key=lambda w: w.received):
        if not found or found[-1].agent != write.agent:
            found.append(Term(write.agent, write.received, write.answered))
    return found


def writes_out_of_turn(writes: Iterable[Write]) -> list[str]:
    """Writes that the API server carried out for a replica whose turn it was not; there may be none.

    A write is in turn when it began after its replica was granted the Lease and was answered before anybody else even
    asked for it.
    """
    writes = list(writes)
    held = terms(writes)
    asked = [term.asked for term in held]
    violations = []
    for write in writes:
        if write.about_lease or write.status >= 300:
            continue
        last = bisect.bisect_right(asked, write.answered) - 1
        if last < 0 or held[last].agent != write.agent or write.received < held[last].granted:
            holder = held[last].agent if last >= 0 else "nobody"
            violations.append(
                f"{write.agent} wrote {write.resource} {write.namespace}/{write.name} in the turn of {holder}"
            )
    return violations
