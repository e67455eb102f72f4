"""The folder in which a model is made, next to the place that it is made for: a run that was killed goes on from there.

    .OUT.COMMAND/
        job.json    what is made, from what: another job never continues this one
        model/      becomes OUT, in one rename, once it is complete
        ...         what the command keeps to go on

Every file is written under another name, flushed and renamed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.sources.lock import LOCK_NAME, FolderLock

PARTIAL = ".partial"
JOB_NAME = "job.json"
SPARE_BYTES = 64 << 20  # config, tokenizer, headers, report
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What a reader of a file raises that is no such file. Of OSError only EIO: others say nothing about the file's content.
DAMAGED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError, RuntimeFailure)
Read = TypeVar("Read")


class ResumableFolder:
    """`locked` makes the folder, `open` what is in it. `command`: what makes the model, for the folder's name."""

    def __init__(self, out: Path, command: str) -> None:
        self.out = out
        self.path = out.parent / f".{out.name}.{command}"
        self.model = self.path / "model"
        self._lock: FolderLock | None = None
        self._say: Callable[[str], None] = lambda sentence: None

    @contextmanager
    def locked(self, say: Callable[[str], None]) -> Iterator[None]:
        """Make the folder and lock it: a context in which no other process works in it.

        Raises:
            InvalidConfigError: a symbolic link is in its place.
            RuntimeFailure: DiskFull, it cannot be written.
        """
        _require_no_link(self.path)
        with ExitStack() as held:
            held.callback(self._remove_if_empty)
            while not self._enter(held, say):
                pass  # whoever was waited for has made the model, and removed the folder together with the lock
            yield

    def _remove_if_empty(self) -> None:
        with suppress(OSError):
            self.path.rmdir()

    def _enter(self, held: ExitStack, say: Callable[[str], None]) -> bool:
        with writing(self.path):
            self.path.mkdir(exist_ok=True)
            try:
                self._lock = held.enter_context(FolderLock(self.path, say))
            except FileNotFoundError:
                return False
        return True

    def _require_lock(self) -> None:
        """A process that stood still for long, with its node, has lost the folder to the next one of another pod.

        Raises:
            RuntimeFailure: DiskFull, the lock is another's.
        """
        if self._lock is not None and not self._lock.is_held():
            raise RuntimeFailure(
                FailureReason.DISK_FULL,
                f"Another run has taken over {self.path}, because this one stood still for too long; that one goes on.",
            )

    def open(self, job: Mapping[str, Any], say: Callable[[str], None], *, discard_other: bool = False) -> None:
        """Begin, or find the folder as a run of the same job left it. `discard_other`: remove the work of another job.

        Raises:
            InvalidConfigError: another job's work is there, or a symbolic link in the place of the model's folder.
            RuntimeFailure: DiskFull, it cannot be written.
        """
        self._say = say
        _require_no_link(self.model)  # --out would become the link, and what it leads to may change
        note = self.path / JOB_NAME
        differing = _differing(note, job) if note.exists() else None
        if differing is not None and not discard_other:
            raise InvalidConfigError(
                f"{self.path} holds the work of another run, with another {differing}; remove that folder, or give "
                "another --out, or --discard-other-work."
            )
        with writing(self.path):
            if differing is not None:
                say(f"{self.path} held the work of a run with another {differing}: it is discarded")
                self.discard()
            self.model.mkdir(parents=True, exist_ok=True)
            for partial in self.path.rglob(f"*{PARTIAL}"):
                partial.unlink()
        self.write_text(note, json.dumps(job, indent=1, sort_keys=True) + "\n")

    def write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Call `write` with another path, flush and rename it to `path`.

        Raises:
            RuntimeFailure: DiskFull, with what to do, or that another run has the folder.
        """
        partial = path.with_name(path.name + PARTIAL)
        with writing(path):
            self._require_lock()
            try:
                write(partial)
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            self._require_lock()  # else the partial file is the other's, who writes it under the same name
            partial.replace(path)

    def write_text(self, path: Path, text: str) -> None:
        """Write a text in UTF-8, whole or not at all; as `write`."""
        # The name of a file of documents may have bytes that are no UTF-8.
        self.write(path, lambda partial: partial.write_text(text, encoding="utf-8", errors="replace"))

    def read(self, path: Path, read: Callable[[Path], Read]) -> Read | None:
        """Return what `read` makes of a file that an earlier run wrote; None where there is none. One that is damaged
        is removed, for it can be made again.

        Raises:
            RuntimeFailure: it cannot be read or removed.
        """
        try:
            return read(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EIO:
                raise RuntimeFailure(
                    FailureReason.CHECKPOINT_INVALID, f"{path} cannot be read: {error.strerror}."
                ) from None
        except DAMAGED:
            pass
        self._say(f"{path} is damaged: it is removed and made again")
        with writing(path):
            path.unlink()
        return None

    def require_space(self, needed_bytes: int) -> None:
        """Refuse to begin without room for `needed_bytes`, less what is there already.

        Raises:
            RuntimeFailure: DiskFull, with both numbers.
        """
        there = sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())
        free_bytes = shutil.disk_usage(self.path).free
        still_bytes = max(0, needed_bytes + SPARE_BYTES - there)
        if still_bytes > free_bytes:
            raise RuntimeFailure(
                FailureReason.DISK_FULL,
                f"{self.out.parent} has {free_bytes / 1e9:.2f} GB free, and {still_bytes / 1e9:.2f} GB are needed for "
                "the checkpoint and the files to make it; free space or give another --out.",
            )

    def finish(self) -> None:
        """Rename the model to its place, and remove what is left."""
        with writing(self.out):
            self._require_lock()
            self.model.replace(self.out)  # also over an empty folder
        shutil.rmtree(self.path, ignore_errors=True)

    def discard(self, *kept: str) -> None:
        """Remove all that is in the folder, but the files of these names and the lock that this process holds."""
        for path in self.path.iterdir():
            if path.name.startswith(LOCK_NAME) or path.name in kept:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def remove_leftover(out: Path, command: str, say: Callable[[str], None]) -> None:
    """Remove the work folder of a run that made `out` and died before it removed the folder.

    Raises:
        RuntimeFailure: DiskFull, it cannot be removed.
    """
    folder = ResumableFolder(out, command)
    if folder.path.is_dir():
        with folder.locked(say), writing(folder.path):
            folder.discard()


def _differing(note: Path, job: Mapping[str, Any]) -> str | None:
    """Return the first thing in which a run differs from the one that wrote the note, in words; None: in none."""
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    differing = (key for key in job if not isinstance(found, dict) or found.get(key) != job[key])
    return next((key.replace("_", " ") for key in differing), None)


def _require_no_link(folder: Path) -> None:
    with writing(folder):  # its name may be too long
        is_link = folder.is_symlink()
    if is_link:
        raise InvalidConfigError(f"{folder} is a symbolic link, and no run of Millstream makes one; remove it.")


def require_free(out: Path) -> None:
    """Raises InvalidConfigError: `out` holds something, cannot be replaced by a rename, or its parent is missing."""
    try:
        _require_free(out)
    except OSError as error:
        raise InvalidConfigError(f"--out {out} cannot be used: {error.strerror}.") from None


def _require_free(out: Path) -> None:
    if out.is_symlink() or os.path.ismount(out):
        kind = "a symbolic link" if out.is_symlink() else "a mount point"
        raise InvalidConfigError(f"--out {out} is {kind}, which no folder can replace; give {out / 'model'}.")
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise InvalidConfigError(f"--out {out} exists and is not an empty folder; give another, or remove it.")
    if not out.parent.is_dir():
        raise InvalidConfigError(f"--out {out}: the folder {out.parent} does not exist.")


@contextmanager
def reading(work: Path) -> Iterator[None]:
    """A context in which an OSError of a file that is read becomes one sentence. `work`: the folder of the run.

    Raises:
        RuntimeFailure: CheckpointInvalid.
    """
    try:
        yield
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error
        raise RuntimeFailure(
            FailureReason.CHECKPOINT_INVALID,
            f"A file that was there cannot be read any more: {what}; if it is in {work}, remove that folder.",
        ) from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context in which an OSError becomes one sentence.

    Raises:
        RuntimeFailure: DiskFull.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            message = f"No space is left to write {path}; free some and run the same command again: it goes on."
        else:
            message = f"Cannot write {path}: {error.strerror or error}."
        raise RuntimeFailure(FailureReason.DISK_FULL, message) from None
