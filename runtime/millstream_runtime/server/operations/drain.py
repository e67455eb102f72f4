"""When a draining server stops accepting new requests. Pure.

After SIGTERM the endpoints of a Service still name the pod for a moment, so new requests are served, not refused.
Kubernetes does not say how long that moment is, and a fixed three seconds were too short on a busy node (requests of an
open loop were refused). So the server refuses requests once none has come for `quiet_seconds`. Clients that never stop
coming, because they know the pod's own address, are refused after a minute, or halfway through a shorter drain, so
that running requests can still end in time.
"""

from __future__ import annotations

from dataclasses import dataclass

LATEST_SECONDS = 60.0
LATEST_SHARE = 0.5  # of the whole drain


@dataclass(frozen=True, slots=True)
class DrainCutoff:
    """The moment from which new requests are refused. Times are seconds of any monotonic clock."""

    quiet_seconds: float
    latest_close_at: float

    @classmethod
    def of(cls, began: float, quiet_seconds: float, drain_seconds: float) -> DrainCutoff:
        """The cutoff of a drain that began at `began` and may last `drain_seconds`."""
        latest = max(quiet_seconds, min(LATEST_SHARE * drain_seconds, LATEST_SECONDS))
        return cls(quiet_seconds, began + min(latest, drain_seconds))

    def seconds_until_close(self, now: float, last_arrival: float) -> float:
        """How long to wait before asking again; 0.0: refuse from now. `last_arrival`: or the start of the drain."""
        return max(0.0, min(last_arrival + self.quiet_seconds, self.latest_close_at) - now)
