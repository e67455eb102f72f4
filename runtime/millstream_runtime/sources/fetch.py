"""Fetch a model from a source into a folder, once.

    HuggingFace ──▶ ResolvedSource ──▶ Transfer ──▶ staged files ──▶ ModelFolder.publish ──▶ .millstream-complete.json
    ImageSource ──▶ (names, sizes, digests)    (resume, verify)     (rename, marker last)

    complete already? ── yes ──▶ kept: no network, no lock, no write
         │ no
    lock ▶ resolve ▶ support files, layers ▶ check ▶ choose weights ▶ space? ▶ weights (in parallel) ▶ check ▶ publish

Killed at any point, the next run continues: partials and unpacked layers are in `.millstream-partial`, named by digest.

`fetch` runs in an init container. It needs msgspec and the standard library, and no torch: `urllib` has proxies, TLS
and timeouts; resuming by Range, digests, and credentials that stay with their origin are implemented here.
`huggingface_hub` is not used for bytes because it compares sizes, not digests, and obeys `HF_HUB_OFFLINE`, which our
image sets for the server.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.sources.folder import FreeSpace, Marker, ModelFolder, free_bytes
from millstream_runtime.sources.layers import LayerContent, apply_layers, model_folder_of, read_record, unpack
from millstream_runtime.sources.lock import FolderLock, LockTimes
from millstream_runtime.sources.progress import DownloadProgress, words_for_seconds
from millstream_runtime.sources.safetensors_header import check_file
from millstream_runtime.sources.selection import (
    INDEX_NAME,
    SUPPORT_LIMIT_BYTES,
    invalid,
    support_files,
    weights_files,
)
from millstream_runtime.sources.source import ImageLayer, ResolvedSource, Source
from millstream_runtime.sources.support_files import check_support_file
from millstream_runtime.sources.transfer import LocalFile, RemoteFile, Transfer, disk_failure

DEFAULT_PARALLEL = 4
MAX_PARALLEL = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """How to fetch. `started` gets the progress of a download when it begins. Tests replace the last two."""

    parallel: int = DEFAULT_PARALLEL
    verify: bool = False  # read and hash a complete folder again
    started: Callable[[DownloadProgress], object] = lambda _: None
    lock_times: LockTimes = field(default_factory=LockTimes)
    free_space: FreeSpace = free_bytes


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The outcome of a fetch."""

    folder: Path
    marker: Marker
    kept: bool  # the folder was complete before
    downloaded_bytes: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The line for tools, and the termination message of an init container."""
        return {
            "event": "fetched",
            "version": 1,
            "source": dict(self.marker.source),
            "requested_revision": self.marker.requested_revision,
            "revision": self.marker.revision,
            "folder": str(self.folder),
            "files": len(self.marker.files),
            "total_bytes": self.marker.total_bytes,
            "downloaded_bytes": self.downloaded_bytes,
            "kept": self.kept,
            "seconds": round(self.seconds, 3),
        }


def fetch(source: Source, into: Path, say: Callable[[str], None], options: FetchOptions | None = None) -> FetchResult:
    """Download the model of `source` into `into`. `say` receives lines for a person.

    Raises:
        RuntimeFailure: DownloadUnauthorized, DownloadFailed, DiskFull, CheckpointInvalid; or InvalidConfigError where
            `into` holds another model. What arrived is kept for the next run.
    """
    try:
        return _fetch(source, into, say, options or FetchOptions())
    except OSError as error:  # a disk error: those of the network are RuntimeFailure already
        raise disk_failure(error, into) from error


def _fetch(source: Source, into: Path, say: Callable[[str], None], options: FetchOptions) -> FetchResult:
    started = time.monotonic()
    folder = ModelFolder(into, options.free_space)

    def result(marker: Marker, downloaded_bytes: int, *, kept: bool) -> FetchResult:
        return FetchResult(into, marker, kept, downloaded_bytes, time.monotonic() - started)

    marker = _usable_marker(folder, source, options, say)
    if isinstance(marker, _Complete):
        return result(marker.marker, 0, kept=True)
    folder.prepare()
    with FolderLock(into, say, options.lock_times) as lock:
        marker = _usable_marker(folder, source, options, say)  # another pod may have finished while we waited
        if isinstance(marker, _Complete):
            return result(marker.marker, 0, kept=True)
        # A damaged folder is repaired with the revision it had, not with the one a branch points to now.
        pinned = source.at(marker.revision) if marker is not None else source
        requested = marker.requested_revision if marker is not None else source.requested_revision
        progress = DownloadProgress(say)
        options.started(progress)
        run = _FetchRun(pinned, folder, progress, lock.guard, options)
        done = run.run(requested)
        return result(done, run.progress.downloaded_bytes, kept=False)


@dataclass(frozen=True, slots=True)
class _Complete:
    marker: Marker


def _usable_marker(
    folder: ModelFolder, source: Source, options: FetchOptions, say: Callable[[str], None]
) -> _Complete | Marker | None:
    """_Complete: nothing to do. A Marker: complete once, now damaged. None: not complete."""
    marker = folder.marker()
    if marker is None:
        return None
    if not marker.matches(source.identity, source.requested_revision):
        kept = " ".join((*marker.source.values(), "at", marker.requested_revision))
        raise InvalidConfigError(f"--into {folder.path} holds {kept}, not {source}; give another folder or empty it.")
    damaged = folder.damaged(marker, read_all=options.verify)
    if damaged is None:
        return _Complete(marker)
    say(f"{folder.path / damaged} changed since the folder was completed; fetching damaged files again")
    return marker


class _FetchRun:
    """One fetch, under the lock."""

    def __init__(
        self,
        source: Source,
        folder: ModelFolder,
        progress: DownloadProgress,
        guard: Callable[[], None],
        options: FetchOptions,
    ) -> None:
        self.progress = progress
        self._source, self._folder, self._guard, self._options = source, folder, guard, options
        self._transfer = Transfer(source.client, folder.partial, progress, guard=guard, explain=source.explain)
        self._files: dict[str, LocalFile] = {}

    def run(self, requested_revision: str) -> Marker:
        source, folder = self._source, self._folder
        resolved = source.resolve()
        self._files.update(model_folder_of(apply_layers(self._unpack_all(resolved)), str(source)))
        names = {*resolved.files, *self._files}
        support = support_files(names, str(source))
        self._require_small(resolved, support)
        self._download(resolved.files[name] for name in support if name in resolved.files)
        for name in support:
            self._check_support_file(name)
        weights = weights_files(names | resolved.others, self._index(), str(source))
        chosen = {*support, *weights}
        folder.require_no_others(chosen)
        self._download(resolved.files[name] for name in weights if name in resolved.files)
        files = {name: self._files[name] for name in sorted(chosen)}
        for name in weights:
            check_file(files[name].path, name)
        self._guard()
        folder.remove_marker()
        contents = {name: (file.size_bytes, file.sha256) for name, file in files.items()}
        marker = Marker(source.identity, requested_revision, resolved.revision, contents)
        folder.publish(files, marker)
        return marker

    def _index(self) -> bytes | None:
        index = self._files.get(INDEX_NAME)
        return index.path.read_bytes() if index is not None else None

    def _require_small(self, resolved: ResolvedSource, support: Iterable[str]) -> None:
        for name in support:
            if name in resolved.files and resolved.files[name].size_bytes > SUPPORT_LIMIT_BYTES:
                raise invalid(f"{self._source}: {name} is larger than the {SUPPORT_LIMIT_BYTES} bytes allowed.")

    def _check_support_file(self, name: str) -> None:
        """Raises RuntimeFailure: CheckpointInvalid. What is wrong is deleted: it must not lie in a volume either."""
        path = self._files[name].path
        try:
            check_support_file(path, name, str(self._source))
        except RuntimeFailure:
            self._folder.discard(path)
            raise

    def _download(self, files: Iterable[RemoteFile]) -> None:
        """Download the missing files, several at a time; the first failure stops the rest."""
        missing = []
        for file in files:
            adopted = self._folder.adopt(file)
            if adopted is None:
                missing.append(file)
            else:
                self._files[file.name] = adopted
        self._announce(missing)
        for file, local in zip(missing, self._in_parallel(missing), strict=True):
            self._files[file.name] = local

    def _in_parallel(self, files: list[RemoteFile]) -> list[LocalFile]:
        """Results in the order of `files`. Daemon threads: one that waits to retry must not delay the exit."""
        todo: SimpleQueue[tuple[int, RemoteFile]] = SimpleQueue()
        done: SimpleQueue[tuple[int, LocalFile | BaseException]] = SimpleQueue()
        stop = threading.Event()
        for numbered in enumerate(files):
            todo.put(numbered)

        def work() -> None:
            with contextlib.suppress(Empty):
                while not stop.is_set():
                    number, file = todo.get_nowait()
                    try:
                        done.put((number, self._transfer.fetch(file)))
                    except BaseException as error:
                        done.put((number, error))
                        return

        for _ in range(min(self._options.parallel, len(files))):
            threading.Thread(target=work, name="fetch", daemon=True).start()
        arrived: dict[int, LocalFile] = {}
        try:
            while len(arrived) < len(files):
                number, outcome = done.get()
                if isinstance(outcome, BaseException):
                    raise outcome  # the other threads end at their next write, which the lock's guard refuses
                arrived[number] = outcome
        finally:
            stop.set()
        return [arrived[number] for number in range(len(files))]

    def _announce(self, files: list[RemoteFile], extra_bytes: int = 0) -> None:
        """Check the free space for the bytes still to come, and add them to the progress."""
        total_bytes = sum(file.size_bytes for file in files)
        arrived_bytes = sum(self._transfer.arrived_bytes(file) for file in files)
        if files:
            self._folder.require_space(total_bytes - arrived_bytes + extra_bytes)
            self.progress.expect(total_bytes)
            named = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
            resumed = f", {arrived_bytes / 1e9:.2f} GB already downloaded" if arrived_bytes else ""
            self.progress.say(f"{self._source}: fetching {named}, {total_bytes / 1e9:.2f} GB{resumed}")

    def _unpack_all(self, resolved: ResolvedSource) -> list[LayerContent[LocalFile]]:
        """Unpack one layer after the other, so that at most one blob is on the disk in addition to unpacked files."""
        folders = {layer.blob.key: self._folder.partial / f"unpacked-{layer.blob.key}" for layer in resolved.layers}
        missing = [layer.blob for layer in resolved.layers if read_record(folders[layer.blob.key]) is None]
        self._announce(missing, extra_bytes=max((blob.size_bytes for blob in missing), default=0))
        return [self._unpack(layer, folders[layer.blob.key]) for layer in resolved.layers]

    def _unpack(self, layer: ImageLayer, folder: Path) -> LayerContent[LocalFile]:
        if (done := read_record(folder)) is not None:
            return done
        blob = self._transfer.fetch(layer.blob)
        where = f"{self._source}, {layer.blob.name}"
        try:
            content = unpack(blob.path, folder, layer.root, where, guard=self._guard, need=self._folder.require_space)
        except RuntimeFailure as failure:
            if failure.reason is FailureReason.CHECKPOINT_INVALID:
                blob.path.unlink(missing_ok=True)  # an invalid layer stays invalid
            raise
        blob.path.unlink()
        return content


def human_summary(result: FetchResult) -> str:
    """The last line for a person."""
    marker = result.marker
    what = f"{len(marker.files)} files, {marker.total_bytes / 1e9:.2f} GB, revision {marker.revision[:19]}"
    if result.kept:
        return f"{result.folder} is complete: {what}"
    rate = result.downloaded_bytes / 1e6 / max(result.seconds, 1e-3)
    took = f"{result.downloaded_bytes / 1e9:.2f} GB came in {words_for_seconds(result.seconds)} at {rate:.1f} MB/s"
    return f"{result.folder} is complete: {what}; {took}"
