"""What goes wrong, and when: plans for the fault proxy. Pure.

A plan looks at each request of the operator and says what happens to it. Requests are counted a scope: a namespace's,
so that many experiments run in parallel under one operator, or all of a proxy's, for a process's whole life.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_NAMESPACED = re.compile(r"^/(?:api|apis/[^/]+)/[^/]+/namespaces/([^/]+)(?:/([^/]+))?(?:/([^/]+))?(?:/(.+))?$")


class Fault(StrEnum):
    """What happens to one request."""

    CONFLICT = "409"
    TOO_MANY = "429"
    SERVER_ERROR = "500"
    TIMEOUT = "timeout"  # kept for ever, never forwarded
    LOST_ANSWER = "lost answer"  # carried out; the connection is cut before the answer
    KILLED_BEFORE = "killed before"  # SIGKILL to the operator; never forwarded
    KILLED_AFTER = "killed after"  # carried out, then SIGKILL


ANSWERS = (Fault.CONFLICT, Fault.TOO_MANY, Fault.SERVER_ERROR, Fault.TIMEOUT, Fault.LOST_ANSWER)
KILLS = (Fault.KILLED_BEFORE, Fault.KILLED_AFTER)
# A read cannot conflict with anything: no API server answers it with 409.
OF_WRITES = frozenset({Fault.CONFLICT})


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the operator, as the proxy saw it."""

    at: float  # seconds of the event loop's clock
    method: str
    path: str
    watch: bool = False
    agent: str = ""

    @property
    def namespace(self) -> str:
        found = _NAMESPACED.match(self.path)
        return found.group(1) if found and found.group(2) else ""

    @property
    def resource(self) -> str:
        """The plural, such as `deployments`; empty where the path names none."""
        found = _NAMESPACED.match(self.path)
        return (found.group(2) or "") if found else self.path.rpartition("/")[2]

    @property
    def name(self) -> str:
        found = _NAMESPACED.match(self.path)
        return (found.group(3) or "") if found else ""

    @property
    def asks_a_model(self) -> bool:
        """A question to a model through the API server's Service proxy: it changes nothing."""
        found = _NAMESPACED.match(self.path)
        return bool(found and found.group(2) == "services" and (found.group(4) or "").startswith("proxy"))

    @property
    def writes(self) -> bool:
        return self.method in WRITES and not self.asks_a_model

    @property
    def about_lease(self) -> bool:
        return self.resource == "leases"

    @property
    def about_events(self) -> bool:
        """Events are written in the background: which request they come after is chance, and so is their number."""
        return self.resource == "events"

    def __str__(self) -> str:
        return f"{self.method} {self.path}{' (watch)' if self.watch else ''}"


@dataclass(slots=True)
class Injection:
    """A fault at the n-th request, from 1, of what counts. It strikes once."""

    fault: Fault
    number: int
    only_writes: bool = False
    only_lease: bool = False
    about_events: bool | None = None  # these alone, all but these, or whatever comes
    seen: int = 0
    struck: Asked | None = None

    def strikes(self, asked: Asked) -> Fault | None:
        """Count the request; the fault, if it is this one's turn."""
        if (self.only_writes and not asked.writes) or (self.only_lease and not asked.about_lease):
            return None
        if self.about_events is not None and asked.about_events is not self.about_events:
            return None
        self.seen += 1
        if self.struck is not None or self.seen != self.number:
            return None
        self.struck = asked
        return self.fault


@dataclass(slots=True)
class Plan:
    """Injections by namespace, and one for the whole proxy under the empty name."""

    injections: dict[str, Injection] = field(default_factory=dict)

    def strikes(self, asked: Asked) -> Fault | None:
        """What happens to this request; None: nothing."""
        for scope in {"", asked.namespace}:
            injection = self.injections.get(scope)
            if injection is not None and (fault := injection.strikes(asked)) is not None:
                return fault
        return None
