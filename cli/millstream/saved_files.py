"""Files that a command saves where the user says: checked before a long run, written whole or not at all.

A link, a pipe or a device is written itself: `--json /dev/stdout` prints, and nothing in /dev is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure


def check_saved_files(saved: Mapping[str, Path | None], read: Iterable[Path] = ()) -> None:
    """Check before a long run that its results can be saved. `saved`: by flag. `read`: files that the run reads.

    Raises:
        InvalidConfigError: there is no such folder, it cannot be written, or the file is a folder or one of the others.
    """
    before, inputs = list[Path](), tuple(read)
    for flag, path in saved.items():
        if path is None:
            continue
        _check_writable(flag, path)
        if any(_is_same(path, one) for one in before):
            raise InvalidConfigError(f"{' and '.join(saved)} are both {path}; give each a file of its own.")
        if any(_is_same(path, one) for one in inputs):
            raise InvalidConfigError(f"{flag} is {path}, which is read; give another file.")
        before.append(path)


def write_saved_file(path: Path, text: str) -> None:
    """Write `text` in UTF-8; half of a surrogate pair, as in a name that is no UTF-8, becomes a question mark.

    Raises:
        RuntimeFailure: DiskFull, the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        if _is_written_in_place(path):
            path.write_text(text, encoding="utf-8", errors="replace")
            return
        try:
            partial.write_text(text, encoding="utf-8", errors="replace")
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise RuntimeFailure(FailureReason.DISK_FULL, f"Cannot write {path}: {error.strerror}.") from None


def _check_writable(flag: str, path: Path) -> None:
    if path.is_dir():
        raise InvalidConfigError(f"{flag} is {path}; that is a folder, give a file.")
    if not path.parent.is_dir():
        raise InvalidConfigError(f"{flag} is {path}; there is no folder {path.parent}.")
    if not _is_written_in_place(path) and not os.access(path.parent, os.W_OK):
        raise InvalidConfigError(f"{flag} is {path}; the folder {path.parent} cannot be written, give another.")


def _is_written_in_place(path: Path) -> bool:
    return path.is_symlink() or (path.exists() and not path.is_file())


def _is_same(path: Path, other: Path) -> bool:
    """Whether two names are of one regular file, which need not exist."""
    if path.exists() and other.exists():
        return path.is_file() and path.samefile(other)
    return path.absolute() == other.absolute()
