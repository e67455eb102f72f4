"""How often an engine that died is started again, and how long to wait before. Pure: moments in, a delay out.

The first time it is tried at once, because clients are waiting. Then it takes longer each time, and after three times
within ten minutes the process gives up: what keeps killing the engine will not go away by itself, and the kubelet's own
back-off, the pod's restart count and the termination message are where people look.
"""

from __future__ import annotations

from collections.abc import Sequence

RESTART_DELAYS_SECONDS = (0.0, 2.0, 10.0)
WINDOW_SECONDS = 600.0


def restart_delay_seconds(deaths_at_seconds: Sequence[float], delays: Sequence[float]) -> float | None:
    """The wait before the next start, None to give up. `deaths_at_seconds` ascend; the last is the one at hand."""
    recent = [at for at in deaths_at_seconds if at > deaths_at_seconds[-1] - WINDOW_SECONDS]
    return delays[len(recent) - 1] if len(recent) <= len(delays) else None
