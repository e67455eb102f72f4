"""The pod's termination message: the result or the failure of a container, for the operator."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from millstream_runtime.errors import InvalidConfigError

TERMINATION_LOG_VARIABLE = "MILLSTREAM_TERMINATION_LOG"
DEFAULT_TERMINATION_LOG = "/dev/termination-log"


def choose_termination_log(path: Path) -> None:
    """Write to `path` from now on, a failure of this process included. The file is created if missing.

    Raises:
        InvalidConfigError: it cannot be created.
    """
    try:
        path.touch()
    except OSError as error:
        raise InvalidConfigError(f"--termination-message-path {path} cannot be written: {error.strerror}.") from None
    os.environ[TERMINATION_LOG_VARIABLE] = str(path)


def write_termination_message(text: str) -> None:
    """Write `text`; does nothing where there is no termination log, as outside a pod."""
    path = Path(os.environ.get(TERMINATION_LOG_VARIABLE, DEFAULT_TERMINATION_LOG))
    if path.exists():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"millstream: cannot write {path}: {error.strerror}", file=sys.stderr)


def unwind_on_sigterm() -> None:
    """Raise SystemExit on SIGTERM, which a container's first process would ignore, so that locks are released."""

    def leave(_signal: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
