"""When a draining server closes its door. Pure.

After SIGTERM the endpoints of a Service still name the pod for a moment, so newcomers are served, not refused. How long
that moment is Kubernetes does not say, and a fixed three seconds were too few on a busy node (requests of an open loop
were refused). So the door closes when nobody has come for `quiet_seconds`; whoever never stops coming, because they
know the pod's own address, is refused after a minute, or in the middle of a shorter drain: what runs can still end in
time.
"""

from __future__ import annotations

from dataclasses import dataclass

LATEST_SECONDS = 60.0
LATEST_SHARE = 0.5  # of the whole drain


@dataclass(frozen=True, slots=True)
class DrainDoor:
    """Times are seconds of any monotonic clock."""

    quiet_seconds: float
    closes_latest: float

    @classmethod
    def of(cls, began: float, quiet_seconds: float, drain_seconds: float) -> DrainDoor:
        """The door of a drain that began now and may last so long."""
        latest = max(quiet_seconds, min(LATEST_SHARE * drain_seconds, LATEST_SECONDS))
        return cls(quiet_seconds, began + min(latest, drain_seconds))

    def wait_seconds(self, now: float, last_came: float) -> float:
        """Until it is to be looked at again; 0.0: it closes now. `last_came`: the last newcomer, or the beginning."""
        return max(0.0, min(last_came + self.quiet_seconds, self.closes_latest) - now)
