"""One `cluster` command at a time per user: the cache, the engine and the cluster's name are shared by all clones."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hack.cluster import base_image, paths


@contextmanager
def only_one(say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock for a block, waiting for another command to end. Then clear what an interrupted one left.

    The lock is the kernel's (flock): it goes with its process, so a killed command leaves none behind.
    """
    with (paths.cache_folder() / "lock").open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            say(f"another cluster command is running (process {handle.read().strip() or '?'}): waiting for it to end")
            fcntl.flock(handle, fcntl.LOCK_EX)
        handle.seek(0)
        handle.truncate()
        handle.write(str(os.getpid()))
        handle.flush()
        for leftover in paths.subfolder("tmp").iterdir():
            base_image.remove_tree(leftover) if leftover.is_dir() else leftover.unlink()
        yield
