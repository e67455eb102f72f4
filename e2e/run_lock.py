"""One run of the end-to-end tests at a time per cluster: each replaces its Millstream, and deletes leftovers."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from pathlib import Path
from typing import IO

from hack.cluster.paths import cache_folder


class AnotherRunError(Exception):
    """Another process runs them; the message says which."""


def lock_file(kubeconfig: Path) -> Path:
    """The file of the cluster, whichever checkout's kubeconfig leads to it."""
    server = re.search(r"^\s*server:\s*(\S+)", kubeconfig.read_text(encoding="utf-8"), re.MULTILINE)
    name = hashlib.sha256((server.group(1) if server else str(kubeconfig)).encode()).hexdigest()[:12]
    return cache_folder() / f"e2e-{name}.lock"


def hold(path: Path) -> IO[str]:
    """Lock the file until the returned handle is closed, or its process ends in whatever way (flock).

    Raises:
        AnotherRunError: another process holds it.
        OSError: the file cannot be written.
    """
    handle = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        holder = handle.read().strip() or "unknown"
        handle.close()
        raise AnotherRunError(
            f"the end-to-end tests run on this cluster already (process {holder}): wait until they end, or stop them."
        ) from None
    handle.seek(0)
    handle.truncate()
    handle.write(str(os.getpid()))
    handle.flush()
    return handle
