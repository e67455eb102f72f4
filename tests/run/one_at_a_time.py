"""One run of the tests at a time per user: all checkouts share the cluster, its registry and the two cores."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "test-run.lock"


class AnotherRunError(Exception):
    """Somebody else holds the lock; the message says who."""


@contextmanager
def one_at_a_time(folder: Path, who: str) -> Iterator[str]:
    """Hold the lock for a block; yields why there is none, where `folder` cannot be written to.

    The lock is the kernel's (flock): it goes with its process, so a run that was killed leaves none behind.

    Raises:
        AnotherRunError: another run is under way.
    """
    try:
        handle = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        yield f"two runs at once would not notice each other: {error}"
        return
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip() or "its process is not known"
            raise AnotherRunError(f"another run of the tests is under way ({holder})") from None
        handle.seek(0)
        handle.truncate()
        handle.write(f"process {os.getpid()}: {who}")
        handle.flush()
        yield ""
