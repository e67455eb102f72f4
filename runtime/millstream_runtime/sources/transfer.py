"""Download one remote file into one local file: resumed after an interruption, verified by digest, then renamed.

    <key>.part   what has arrived so far         (key = digest: a partial can only belong to this content)
    <key>        all of it, and the digest fits

A partial survives the process: the next run hashes it from the disk and asks the server for the rest. A wrong digest
removes the file, so that no wrong content is resumed or looks complete.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.sources.client import Client, ConnectionLost, HTTPStatus, Response, Retry, TransferError
from millstream_runtime.sources.progress import DownloadProgress

CHUNK_BYTES = 1 << 20
# The hub's CDN does not send more than 50 GB in one answer; larger files are asked for in ranges.
SEGMENT_BYTES = 16 << 30
DIGEST_ATTEMPTS = 2  # a partial of an earlier run may be damaged on disk; the second attempt starts from nothing

Explain = Callable[[TransferError, str], RuntimeFailure]


@dataclass(frozen=True, slots=True)
class Digest:
    """What the content must hash to: `sha256`, or `git-sha1` (git's blob id: SHA-1 over `blob <size>\\0` + content)."""

    algorithm: str
    hex: str


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a URL. `digest` is None only where a mirror provides none; then only the size is checked."""

    name: str
    url: str
    size_bytes: int
    digest: Digest | None

    @property
    def key(self) -> str:
        """A local name unique to this content; the URL of a file without digest contains its revision."""
        if self.digest is not None:
            return f"{self.digest.algorithm}-{self.digest.hex}"
        return f"url-{hashlib.sha256(self.url.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file whose content is verified. `sha256` in hex."""

    path: Path
    size_bytes: int
    sha256: str


class Hashes:
    """SHA-256 for the marker and, where the source uses git, the blob id, in one pass."""

    def __init__(self, size_bytes: int, digest: Digest | None) -> None:
        self._sha256 = hashlib.sha256()
        self._expected = digest
        self._git = None
        if digest is not None and digest.algorithm == "git-sha1":
            self._git = hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)

    def update(self, data: bytes) -> None:
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def match(self) -> bool:
        """Whether the content has the digest that the source promised."""
        if self._expected is None:
            return True
        seen = self._git.hexdigest() if self._git is not None else self.sha256
        return seen == self._expected.hex


class Transfer:
    """Downloads into `folder`. `guard` is called before every write and raises when writing is no longer allowed."""

    def __init__(
        self, client: Client, folder: Path, progress: DownloadProgress, *, guard: Callable[[], None], explain: Explain
    ) -> None:
        self._client = client
        self._folder = folder
        self._progress = progress
        self._guard = guard
        self._explain = explain

    def arrived_bytes(self, file: RemoteFile) -> int:
        """Bytes of `file` that earlier runs left here."""
        for path in (self._folder / file.key, self._partial(file)):
            if path.is_file():
                return min(path.stat().st_size, file.size_bytes)
        return 0

    def fetch(self, file: RemoteFile) -> LocalFile:
        """Download and verify all of `file`.

        Raises:
            RuntimeFailure: DownloadUnauthorized, DownloadFailed, DiskFull; partials stay for the next run, except
                when the content itself was wrong.
        """
        done = self._folder / file.key
        if done.is_file() and (kept := verified(done, file)) is not None:
            self._progress.keep(file.size_bytes)
            return kept
        for attempt in range(DIGEST_ATTEMPTS):
            try:
                hashes = self._download(file)
            except TransferError as error:
                raise self._explain(error, file.name) from None
            except OSError as error:
                raise disk_failure(error, self._folder) from None
            if hashes.match():
                self._partial(file).replace(done)
                return LocalFile(done, file.size_bytes, hashes.sha256)
            self._partial(file).unlink()
            self._progress.discard(file.size_bytes)
            if attempt + 1 < DIGEST_ATTEMPTS:
                self._progress.say(f"{file.name} does not have the digest that its source promised; fetching it again")
        raise RuntimeFailure(
            FailureReason.DOWNLOAD_FAILED,
            f"{file.name} arrived {DIGEST_ATTEMPTS} times with another {_digest_words(file)} than its source promised; "
            "a proxy or mirror on the way changes or cuts content.",
        )

    def _partial(self, file: RemoteFile) -> Path:
        return self._folder / f"{file.key}.part"

    def _download(self, file: RemoteFile) -> Hashes:
        retry = Retry(self._client.policy, self._progress.say)
        with _Arrival(self._partial(file), file, self._progress) as arrival:
            while arrival.offset < file.size_bytes:
                before = arrival.offset
                try:
                    self._segment(arrival)
                except TransferError as error:
                    if arrival.offset > before:
                        retry.progressed()
                    if isinstance(error, HTTPStatus) and error.status == 416 and before:
                        arrival.restart()  # the partial is longer than the server's file
                        error.retryable = True
                    retry.wait_or_raise(error)
            return arrival.hashes

    def _segment(self, arrival: _Arrival) -> None:
        """Download the bytes of one response."""
        file, start = arrival.file, arrival.offset
        end = min(start + SEGMENT_BYTES, file.size_bytes)
        ranged = start > 0 or end < file.size_bytes
        with self._client.open(file.url, {"Range": f"bytes={start}-{end - 1}"} if ranged else {}) as response:
            if response.status == 206:
                _require_range(response, start)
            else:  # this server sends all or nothing
                end = file.size_bytes
                if start:
                    arrival.restart()
            while arrival.offset < end:
                data = response.read(min(CHUNK_BYTES, end - arrival.offset))
                if not data:
                    raise ConnectionLost(response.server, f"cut after {arrival.offset} of {file.size_bytes} bytes")
                self._guard()
                arrival.append(data)
                self._progress.add(len(data))


class _Arrival:
    """A partial file, the hashes of its content, and `offset`: the first byte still missing."""

    def __init__(self, path: Path, file: RemoteFile, progress: DownloadProgress) -> None:
        self.file = file
        self.offset = 0
        self.hashes = Hashes(file.size_bytes, file.digest)
        self._progress = progress
        path.touch()
        # Not append mode: if two processes ever write here, both write the same content at the same place.
        self._target = path.open("r+b")

    def __enter__(self) -> Self:
        """Hash the content that an earlier run left."""
        while data := self._target.read(CHUNK_BYTES):
            self.hashes.update(data)
            self.offset += len(data)
        self._progress.keep(self.offset)
        if self.offset > self.file.size_bytes:
            self.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._target.flush()
                os.fsync(self._target.fileno())
        finally:
            self._target.close()

    def append(self, data: bytes) -> None:
        self._target.write(data)
        self.hashes.update(data)
        self.offset += len(data)

    def restart(self) -> None:
        """Discard the content and start over."""
        self._progress.discard(self.offset)
        self._target.seek(0)
        self._target.truncate()
        self.offset = 0
        self.hashes = Hashes(self.file.size_bytes, self.file.digest)


def verified(path: Path, file: RemoteFile) -> LocalFile | None:
    """`path` as a LocalFile if it has the content that `file` promises, else None. Reads all of it."""
    if path.stat().st_size != file.size_bytes:
        return None
    hashes = Hashes(file.size_bytes, file.digest)
    with path.open("rb") as source:
        while data := source.read(CHUNK_BYTES):
            hashes.update(data)
    return LocalFile(path, file.size_bytes, hashes.sha256) if hashes.match() else None


def disk_failure(error: OSError, folder: Path) -> RuntimeFailure:
    """DiskFull where the disk or a quota is full; else DownloadFailed with the file system's error."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RuntimeFailure(
            FailureReason.DISK_FULL,
            f"No space is left in {folder}; give the model cache a larger volume and try again.",
        )
    return RuntimeFailure(FailureReason.DOWNLOAD_FAILED, f"{folder} cannot be written: {error.strerror or error}.")


def _require_range(response: Response, start: int) -> None:
    """Check that a 206 begins at `start` (RFC 9110, 14.4), or bytes would be written in the wrong place."""
    if not response.headers.get("content-range", "").startswith(f"bytes {start}-"):
        raise ConnectionLost(
            response.server, f"it answered another range than was asked for, from byte {start}", retryable=False
        )


def _digest_words(file: RemoteFile) -> str:
    return file.digest.algorithm if file.digest is not None else "size"
