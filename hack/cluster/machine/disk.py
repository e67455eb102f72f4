"""How much disk a first run needs, measured, and whether it is there.

What `make demo` leaves on a machine that had nothing, in GiB (docs/local-cluster.md has the table):

    the user's caches   Go modules and build cache, tools
    Docker's data root  node image, registry, and the node's own copies of the images that it pulled

The development environment (`make venv`) is installed before this is asked.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from hack.cluster.errors import ClusterError

GIB = 2**30
CACHE_BYTES = 8 * GIB
DOCKER_BYTES = 16 * GIB


def refuse_full(needs: Iterable[tuple[Path, int]], *, free_bytes: Callable[[Path], int] | None = None) -> None:
    """Raise ClusterError when a file system lacks room for all the folders on it: two on one disk need the sum."""
    free_bytes = free_bytes or (lambda folder: shutil.disk_usage(folder).free)
    by_device: dict[int, list[tuple[Path, int]]] = {}
    for folder, needed in needs:
        if folder.is_dir():  # a remote engine's data root is not on this machine
            by_device.setdefault(folder.stat().st_dev, []).append((folder, needed))
    for places in by_device.values():
        total, free = sum(needed for _, needed in places), free_bytes(places[0][0])
        if free < total:
            named = " and ".join(f"{folder} ({needed / GIB:.0f} GiB)" for folder, needed in places)
            raise ClusterError(
                f"The disk of {named} has {free // GIB} GiB free and a first run needs {total / GIB:.0f} GiB: make "
                "room, or point XDG_CACHE_HOME (or Docker's data-root) at a larger disk."
            )
