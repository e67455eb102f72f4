"""Restart policy for a crashed engine: how often, and with which delay. Pure: moments in, a delay out.

The first restart is immediate, because clients are waiting. Each further one waits longer, and after three restarts
within ten minutes the process gives up: the cause will not go away by itself, and the kubelet's back-off, the pod's
restart count and the termination message make it visible.
"""

from __future__ import annotations

from collections.abc import Sequence

RESTART_DELAYS_SECONDS = (0.0, 2.0, 10.0)
WINDOW_SECONDS = 600.0


def restart_delay_seconds(crashes_at_seconds: Sequence[float], delays: Sequence[float]) -> float | None:
    """The wait before the next start; None: give up. `crashes_at_seconds` ascend; the last is the current crash."""
    recent = [at for at in crashes_at_seconds if at > crashes_at_seconds[-1] - WINDOW_SECONDS]
    return delays[len(recent) - 1] if len(recent) <= len(delays) else None
