"""Words for the signal that ended a process."""

from __future__ import annotations

import signal

OF_BUS_ERROR = "often because a model's file was cut while it was read, or /dev/shm is full"


def killed_by(exit_code: int) -> str:
    """`exit_code`: negative, the signal's number, as in `subprocess`."""
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # most real-time signals have none
        name = f"signal {-exit_code}"
    return f"was killed by {name}" + (f" ({OF_BUS_ERROR})" if -exit_code == signal.SIGBUS else "")
