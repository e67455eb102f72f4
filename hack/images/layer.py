"""Files -> one image layer, the same bytes for the same files on every machine.

An image layer is a tar whose entries are laid over what the layers below left. Owner, times and order would differ
from one checkout to the next; here every entry is root's, dated 1980, and sorted, so a layer's digest depends on
names, content and the executable bit alone (the rules of reproducible-builds.org).
"""

from __future__ import annotations

import hashlib
import stat
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

EPOCH_SECONDS = 315_532_800  # 1980-01-01: the oldest date that a zip file inside an image can also hold
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """A file of a layer: where it lands (relative to the layer's target) and where its bytes are now."""

    name: str
    path: Path


class Writable(Protocol):
    """Where a layer's bytes go: a file, or an upload in progress."""

    def write(self, data: bytes, /) -> object: ...


def write_layer(entries: Iterable[Entry], target: str, out: Writable) -> None:
    """Write an uncompressed tar of `entries` below `target` (an absolute path) to `out`."""
    root = target.strip("/")
    stream = cast(Any, out)  # tarfile's type asks for a whole file; mode "w|" only ever writes
    with tarfile.open(mode="w|", fileobj=stream, format=tarfile.GNU_FORMAT, bufsize=_BUFFER_BYTES) as tar:
        tar.addfile(_directory(root))
        made = {root}
        for entry in sorted(entries):
            name = f"{root}/{entry.name}"
            for parent in _missing_parents(name, made):
                tar.addfile(_directory(parent))
            if entry.path.is_symlink():
                tar.addfile(_symlink(name, entry.path.readlink()))
            else:
                with entry.path.open("rb") as content:
                    tar.addfile(_file(name, entry.path), content)


def content_hash(entries: Iterable[Entry]) -> str:
    """SHA-256, in hex, over what a layer of these entries would hold: names, executable bits, content."""
    digest = hashlib.sha256()
    for entry in sorted(entries):
        if entry.path.is_symlink():
            kind, content = "link", hashlib.sha256(str(entry.path.readlink()).encode()).hexdigest()
        else:
            with entry.path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            kind = "exec" if _executable(entry.path) else "file"
        digest.update(f"{entry.name}\0{kind}\0{content}\n".encode())
    return digest.hexdigest()


def entries_below(folder: Path, *, prefix: str = "") -> list[Entry]:
    """Every file and link below `folder`, named relative to it, with `prefix` before the name."""
    return [
        Entry(prefix + path.relative_to(folder).as_posix(), path)
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    ]


def _missing_parents(name: str, made: set[str]) -> list[str]:
    """Folders between the layer's target and `name` that have no entry yet, outermost first."""
    missing: list[str] = []
    parent = name.rpartition("/")[0]
    while parent not in made:
        missing.append(parent)
        parent = parent.rpartition("/")[0]
    made.update(missing)
    return missing[::-1]


def _info(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.mtime = kind, mode, EPOCH_SECONDS
    return info


def _directory(name: str) -> tarfile.TarInfo:
    return _info(name, tarfile.DIRTYPE, 0o755)


def _file(name: str, path: Path) -> tarfile.TarInfo:
    info = _info(name, tarfile.REGTYPE, 0o755 if _executable(path) else 0o644)
    info.size = path.stat().st_size
    return info


def _symlink(name: str, target: Path) -> tarfile.TarInfo:
    info = _info(name, tarfile.SYMTYPE, 0o777)
    info.linkname = str(target)
    return info


def _executable(path: Path) -> bool:
    return bool(path.stat().st_mode & stat.S_IXUSR)


def copy_entries(entries: Iterable[Entry], folder: Path) -> None:
    """Lay `entries` out below `folder`, by hard link where the file system allows it, else by copy."""
    for entry in entries:
        destination = folder / entry.name
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            destination.hardlink_to(entry.path)
        except OSError:
            with entry.path.open("rb") as source, destination.open("wb") as copy:
                _copy_bytes(source, copy)
            destination.chmod(entry.path.stat().st_mode & 0o777)


def _copy_bytes(source: BinaryIO, destination: BinaryIO) -> None:
    while chunk := source.read(_BUFFER_BYTES):
        destination.write(chunk)
