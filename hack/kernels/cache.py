"""Where compiled kernels are kept: the user's cache, which all clones share; else this checkout; else a new folder."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from hack.cluster import paths

NEEDED_BYTES = 256 << 20  # of disk, for all variants of the kernels and their scratch files


@cache
def cache_folder(name: str) -> Path:
    """A folder `name` that can be written to; one line on stderr where it is not the user's cache.

    Raises:
        OSError: the temporary folder cannot be written to either.
    """
    reasons = []
    for candidate in _candidates(name):
        try:
            folder = candidate()
            _check(folder)
        except OSError as error:
            reasons.append(str(error))
            continue
        if reasons:
            print(f"compiled kernels are kept in {folder}: {'; '.join(reasons)}", file=sys.stderr)
        return folder
    raise OSError(f"compiled kernels can be kept nowhere: {'; '.join(reasons)}")


def _candidates(name: str) -> Iterator[Callable[[], Path]]:
    yield lambda: paths.subfolder(name)
    yield lambda: paths.TOOLS / name
    yield lambda: Path(tempfile.mkdtemp(prefix=f"millstream-{name}-"))


def _check(folder: Path) -> None:
    """Raise OSError where `folder` cannot be written to, or its disk is full."""
    folder.mkdir(parents=True, exist_ok=True)
    trial = folder / f".trial.{os.getpid()}"
    trial.write_bytes(b"\0")
    trial.unlink()
    if (free := shutil.disk_usage(folder).free) < NEEDED_BYTES:
        raise OSError(f"{folder} has {free >> 20} MiB of disk left, of {NEEDED_BYTES >> 20} MiB that it needs")
