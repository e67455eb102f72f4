"""The operator's catalogue file: read at the start, and again when it changes.

A mounted ConfigMap is swapped by a link, so the file's identity changes with its content, and a periodic check is
enough. A file that cannot be used changes nothing: the last good catalogue stays, `problem` says why, and the log says
it once.
"""

from __future__ import annotations

import logging
from pathlib import Path

from millstream_operator.catalog.catalog_file import read_catalog_file
from millstream_operator.catalog.gpu import CatalogError, GpuCatalog, load_catalog

log = logging.getLogger(__name__)


class CatalogWatch:
    """`catalog` is the last good one; the shipped one where no file is named, or none was good yet."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: object = None
        self.catalog: GpuCatalog = load_catalog()
        self.problem: str | None = None
        self.refresh()

    def refresh(self) -> bool:
        """Read the file if it changed. Return whether there is another catalogue than before."""
        if self._path is None or (now := _identity(self._path)) == self._seen:
            return False
        self._seen = now
        try:
            read = read_catalog_file(self._path)
        except CatalogError as error:
            self.problem = str(error)
            log.error("the GPU catalogue stays as it was: %s", error)
            return False
        self.problem = None
        changed = read.fingerprint != self.catalog.fingerprint
        self.catalog = read
        log.info("the GPU catalogue has changes from %s", self._path)
        return changed


def _identity(path: Path) -> object:
    """Return a value that changes with the content; () where there is no file."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
