"""Unpack the model files of an image layer's tar archive, as new regular files only.

    blob (gzip or plain) ──▶ ForwardReader (bounded) ──▶ tar members ──▶ <layer folder>/<path>, .layer.json last

An archive is untrusted: a name or a link may lead outside, a header may ask for gigabytes of memory, a kilobyte may
unpack to a terabyte. So only folders and regular files are created, with names that were checked part by part, in an
empty folder; links and devices next to the model are refused; and the reader counts every byte. Everything else in the
image (an operating system, say) is skipped, never written.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Generic, Protocol, TypeVar, cast

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.sources.selection import (
    GGUF_SUFFIX,
    SUPPORT_LIMIT_BYTES,
    invalid,
    is_support_file,
    is_weights_file,
    name_in_model,
    safe_relative_path,
)
from millstream_runtime.sources.transfer import CHUNK_BYTES, LocalFile, disk_failure

MAX_MEMBERS = 200_000
MAX_HEADER_BYTES = 1 << 20  # one read by tarfile itself: a header, or a pax record
MAX_EXPANSION = 20  # weights hardly compress; an operating system does three to five times
EXPANSION_FLOOR_BYTES = 64 << 20
MAX_DEPTH = 4  # folders between the root and a model file
RECORD_NAME = ".layer.json"
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"  # OCI image-spec, layer.md: a name that a lower layer has is deleted
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class ByteSource(Protocol):
    """Bytes, forwards."""

    def read(self, size: int, /) -> bytes: ...


class ForwardReader:
    """The file interface that `tarfile` needs, over a stream, with a limit per read and in total."""

    def __init__(
        self, source: ByteSource, limit_bytes: int, where: str, skip_to: Callable[[int], object] | None = None
    ) -> None:
        """`skip_to`: moves `source` forward without reading, where that is possible."""
        self._source = source
        self._skip_to = skip_to
        self._limit_bytes = limit_bytes
        self._where = where
        self._position = 0

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        """Forwards only."""
        if position < self._position:
            raise invalid(f"{self._where} is not a tar archive that can be read in one pass.")
        if self._skip_to is not None and position - self._position > MAX_HEADER_BYTES:
            self._skip_to(position)
            self._position = position
        while self._position < position:
            if not self.read(min(MAX_HEADER_BYTES, position - self._position)):
                break
        return self._position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise invalid(f"{self._where} has a tar header of {size} bytes; at most {MAX_HEADER_BYTES} are read.")
        data = self._source.read(size)
        self._position += len(data)
        if self._position > self._limit_bytes:
            raise invalid(
                f"{self._where} unpacks to more than {self._limit_bytes / 1e9:.2f} GB, which no model of its size does."
            )
        return data


FileT = TypeVar("FileT")


@dataclass(frozen=True)
class LayerContent(Generic[FileT]):
    """The files that one layer adds and removes, by path below its root."""

    files: Mapping[str, FileT]
    removed: frozenset[str]  # a path, and all below it
    emptied: frozenset[str]  # all below it, from the layers underneath


def unpack(
    blob: Path, folder: Path, root: str, where: str, *, guard: Callable[[], None], need: Callable[[int], None]
) -> LayerContent[LocalFile]:
    """Unpack the model files of a verified blob; returns at once if an earlier run did.

    Args:
        folder: created here; replaced if incomplete.
        root: only what lies below this folder of the archive counts; "" for all.
        guard: raises when writing is no longer allowed.
        need: called with the size of a file before it is written; raises when the disk is too small.

    Raises:
        RuntimeFailure: CheckpointInvalid (the archive), DiskFull, UnsupportedByRuntime (zstd).
    """
    if (done := read_record(folder)) is not None:
        return done
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir()
        with opened(blob, where) as archive:
            content = walk(archive, root, where, _Writer(folder, where, guard, need).write)
        _write_record(folder, content)
    except OSError as error:
        raise disk_failure(error, folder.parent.parent) from error
    return content


@contextlib.contextmanager
def opened(blob: Path, where: str) -> Iterator[ForwardReader]:
    """Open the archive inside a local blob; its first bytes decide the format, not its media type."""
    limit_bytes = EXPANSION_FLOOR_BYTES + MAX_EXPANSION * blob.stat().st_size
    with blob.open("rb") as raw:
        magic = raw.read(4)
        raw.seek(0)
        with decompressed(raw, magic, where) as source:
            yield ForwardReader(source, limit_bytes, where)


@contextlib.contextmanager
def decompressed(raw: ByteSource, magic: bytes, where: str) -> Iterator[ByteSource]:
    """`raw` without its compression; what is damaged becomes a RuntimeFailure."""
    if magic.startswith(ZSTD_MAGIC):
        raise RuntimeFailure(
            FailureReason.UNSUPPORTED_BY_RUNTIME,
            f"{where} is compressed with zstd, which this Python cannot read; push it as tar or tar+gzip "
            "(weights hardly compress: plain tar is the fastest).",
        )
    try:
        yield gzip.GzipFile(fileobj=cast(IO[bytes], raw)) if magic.startswith(GZIP_MAGIC) else raw
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise invalid(f"{where} is not a readable tar archive: {error}.") from None


def members(archive: ForwardReader, where: str) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Every entry, in order. An entry's data must be read before the next is asked for."""
    with tarfile.TarFile(fileobj=cast(IO[bytes], archive), errorlevel=2) as tar:
        count = 0
        while (member := tar.next()) is not None:
            count += 1
            if count > MAX_MEMBERS:
                raise invalid(f"{where} has more than {MAX_MEMBERS} entries.")
            cast(Any, tar).members.clear()  # tarfile would keep them all
            yield tar, member


def path_below(member: tarfile.TarInfo, root: str, where: str) -> PurePosixPath | None:
    """The entry's path below `root`; None where it lies elsewhere or is the root itself.

    Raises:
        RuntimeFailure: CheckpointInvalid, the name is absolute or climbs out.
    """
    if member.name in ("", ".", "./"):
        return None
    path = safe_relative_path(member.name)
    if path is None:
        raise invalid(f"{where} has an entry {member.name[:80]!r}, which leads out of its folder; it is refused.")
    if root and path.parts[0] != root:
        return None
    if root and len(path.parts) == 1 and not member.isdir():
        raise invalid(f"{where} has /{root} as a link or file; it must be a folder.")
    below = PurePosixPath(*path.parts[1:]) if root else path
    return below if below.parts else None


def require_plain(member: tarfile.TarInfo, where: str) -> None:
    """Raises RuntimeFailure: CheckpointInvalid, a link, a device or a sparse file."""
    if member.isdir() or (member.isreg() and not member.issparse()):
        return
    kind = "link" if member.issym() or member.islnk() else "sparse file" if member.issparse() else "device"
    raise invalid(f"{where} has {member.name[:80]!r} as a {kind}; a model's files must be regular files.")


def walk(
    archive: ForwardReader, root: str, where: str, visit: Callable[[tarfile.TarFile, tarfile.TarInfo, str], FileT]
) -> LayerContent[FileT]:
    """One pass over an archive; `visit` is called for each file that may be part of a model, with its path.

    Raises:
        RuntimeFailure: CheckpointInvalid, something that no model has.
    """
    files: dict[str, FileT] = {}
    removed, emptied = set[str](), set[str]()
    for tar, member in members(archive, where):
        path = path_below(member, root, where)
        if path is None:
            continue
        require_plain(member, where)
        if path.name == OPAQUE:
            emptied.add(str(path.parent))
        elif path.name.startswith(WHITEOUT):
            removed.add(str(path.parent / path.name.removeprefix(WHITEOUT)))
        elif member.isreg() and wanted(path):
            if str(path) in files:
                raise invalid(f"{where} has {str(path)!r} twice.")
            files[str(path)] = visit(tar, member, str(path))
    return LayerContent(files, frozenset(removed), frozenset(emptied))


class _Writer:
    """Archive entries -> new files in `folder`."""

    def __init__(self, folder: Path, where: str, guard: Callable[[], None], need: Callable[[int], None]) -> None:
        self._folder, self._where = folder, where
        self._guard, self._need = guard, need

    def write(self, tar: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> LocalFile:
        target = self._folder / name
        if is_support_file(target.name) and member.size > SUPPORT_LIMIT_BYTES:
            raise invalid(
                f"{self._where} has {name!r} with {member.size} bytes; at most {SUPPORT_LIMIT_BYTES} are read."
            )
        self._need(member.size)
        target.parent.mkdir(parents=True, exist_ok=True)
        digest, size_bytes = hashlib.sha256(), 0
        source = tar.extractfile(member)
        assert source is not None  # noqa: S101 - a regular file
        with target.open("xb") as output:
            while data := source.read(CHUNK_BYTES):
                self._guard()
                output.write(data)
                digest.update(data)
                size_bytes += len(data)
            output.flush()
            os.fsync(output.fileno())
        if size_bytes != member.size:
            raise invalid(f"{self._where} ends in the middle of {name!r}.")
        return LocalFile(target, size_bytes, digest.hexdigest())


def wanted(path: PurePosixPath) -> bool:
    """Whether an archive's file may be part of a model."""
    return len(path.parts) <= MAX_DEPTH and (is_support_file(path.name) or is_weights_file(path.name))


def apply_layers(layers: list[LayerContent[FileT]]) -> dict[str, FileT]:
    """Apply the layers, lowest first, and return the resulting files."""
    seen: dict[str, FileT] = {}
    for layer in layers:
        gone = [f"{path}/" if path != "." else "" for path in layer.emptied]
        gone += [f"{path}/" for path in layer.removed]
        seen = {
            name: file
            for name, file in seen.items()
            if name not in layer.removed and not any(name.startswith(prefix) for prefix in gone)
        }
        seen.update(layer.files)
    return seen


def model_folder_of(files: Mapping[str, FileT], where: str) -> dict[str, FileT]:
    """The files of the one folder that has a config.json, by name in it; the highest one where there are several.

    Where none has, that of a GGUF file.
    """
    paths = [PurePosixPath(name) for name in files]
    found = {path.parent for path in paths if path.name == "config.json"}
    found = found or {path.parent for path in paths if path.suffix == GGUF_SUFFIX}
    folders = sorted(found, key=lambda folder: (len(folder.parts), str(folder)))
    if not folders:
        return {}
    if len(folders) > 1 and len(folders[0].parts) == len(folders[1].parts):
        raise invalid(f"{where} has a model in {folders[0]} and in {folders[1]}; it must have one.")
    named = {name_in_model(PurePosixPath(path), folders[0]): file for path, file in files.items()}
    return {name: file for name, file in named.items() if name is not None}


def read_record(folder: Path) -> LayerContent[LocalFile] | None:
    """The content that an earlier run unpacked, if it completed and all files are still here."""
    try:
        record = json.loads((folder / RECORD_NAME).read_bytes())
        files = {name: LocalFile(folder / name, size, sha256) for name, (size, sha256) in record["files"].items()}
        whole = all(file.path.stat().st_size == file.size_bytes for file in files.values())
        return LayerContent(files, frozenset(record["removed"]), frozenset(record["emptied"])) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _write_record(folder: Path, content: LayerContent[LocalFile]) -> None:
    files = {name: [file.size_bytes, file.sha256] for name, file in content.files.items()}
    record = {"files": files, "removed": sorted(content.removed), "emptied": sorted(content.emptied)}
    draft = folder / f"{RECORD_NAME}.new"
    draft.write_text(json.dumps(record), encoding="utf-8")
    draft.replace(folder / RECORD_NAME)
