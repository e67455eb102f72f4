"""A lock that gives a folder one writer, also where pods on several nodes share the volume.

    .millstream-lock   {"owner": …, "beat": n}      created by O_EXCL: exactly one creator, NFSv3 and newer included

`flock` and `fcntl` locks are not used: over NFS, SMB and FUSE they are silently local to one node, or remain when a
node dies, depending on mount options. Here all state is in the file's content:

- The owner rewrites the file every `beat_seconds` with the next `beat`.
- A waiter reopens the file (close-to-open consistency makes NFS show the newest content) and believes that the owner
  is dead when the content did not change for `stale_seconds` *by the waiter's own monotonic clock*. No two clocks are
  ever compared, so nodes may disagree about the time.
- An owner that could not beat for `fence_seconds` (< `stale_seconds`) stops: `guard()` is called before every write. So
  an owner that was cut off has stopped writing before another process may take over.
- Taking over is a rename of the stale file to a private name. A process that then finds other content than it watched
  has taken a live lock by accident; it puts the file back with `link` (which never overwrites) and keeps waiting.
- On one machine there is no wait: an owner in the same PID namespace whose process is gone is dead at once.

Remaining risk: a process frozen between `guard()` and its `write` for longer than the difference of the two
limits. It can then only write bytes of the same content at the same offset (partials are named by digest), and
nothing counts before a digest has been checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from millstream_runtime.errors import FailureReason, RuntimeFailure

LOCK_NAME = ".millstream-lock"
CONTENT_LIMIT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LockTimes:
    """fence < stale, with room for one slow write between them."""

    beat_seconds: float = 5.0
    fence_seconds: float = 25.0
    stale_seconds: float = 60.0
    poll_seconds: float = 1.0


class FolderLock:
    """A context manager: waits for the lock, renews it in a thread, releases it at the end."""

    def __init__(self, folder: Path, say: Callable[[str], None], times: LockTimes | None = None) -> None:
        self._path = folder / LOCK_NAME
        self._say = say
        self._times = times or LockTimes()
        self._owner = {**_process_identity(), "token": secrets.token_hex(8)}
        self._beat = 0
        self._confirmed_at = 0.0
        self._lost = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="folder-lock", daemon=True)

    def __enter__(self) -> Self:
        said = False
        while not self._create():
            if not said:
                self._say(f"waiting for {_owner_words(self._read())}, which is filling {self._path.parent}")
                said = True
            self._wait_until_free()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._lost.set()  # a worker thread that is still reading must not write any more
        self._thread.join()
        if self._is_mine(self._read()):
            with contextlib.suppress(OSError):
                self._path.unlink()

    def is_held(self) -> bool:
        """Whether the lock names this process as it is read now. Raises OSError: it cannot be read."""
        return self._is_mine(self._read())

    def guard(self) -> None:
        """Raises RuntimeFailure: DownloadFailed, the lock is not provably ours any more."""
        silent_seconds = time.monotonic() - self._confirmed_at
        if self._lost.is_set() or silent_seconds > self._times.fence_seconds:
            raise RuntimeFailure(
                FailureReason.DOWNLOAD_FAILED,
                f"{self._path.parent} could not be kept locked (its volume did not answer, or another pod took over); "
                "what has arrived is kept, and the next attempt continues from there.",
            )

    def _create(self) -> bool:
        try:
            handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(self._content())
                file.flush()
                os.fsync(file.fileno())
        except OSError:  # a full disk: an empty lock would make the next process wait
            self._path.unlink(missing_ok=True)
            raise
        self._confirmed_at = time.monotonic()
        return True

    def _content(self) -> bytes:
        return json.dumps({"owner": self._owner, "beat": self._beat}).encode()

    def _read(self) -> bytes | None:
        """The content as it is now; None when there is no lock file."""
        try:
            with self._path.open("rb") as file:
                return file.read(CONTENT_LIMIT_BYTES)
        except FileNotFoundError:
            return None

    def _is_mine(self, content: bytes | None) -> bool:
        return bool(_owner_of(content).get("token") == self._owner["token"])

    def _renew(self) -> None:
        while not self._stop.wait(self._times.beat_seconds):
            started = time.monotonic()
            try:
                if not self._is_mine(self._read()):
                    self._lost.set()
                    return
                self._beat += 1
                # In place, not by rename: a rename could put our file over that of an owner who came after us.
                with self._path.open("r+b") as file:
                    file.write(self._content())
                    file.truncate()
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                continue  # `guard` counts the time since the last renewal
            self._confirmed_at = started

    def _wait_until_free(self) -> None:
        """Return when the file is gone, or was stale and has been taken away."""
        seen, seen_at = self._read(), time.monotonic()
        while seen is not None:
            if _owner_is_dead_here(_owner_of(seen)) or time.monotonic() - seen_at > self._times.stale_seconds:
                self._take_over(seen)
                return
            time.sleep(self._times.poll_seconds)
            content = self._read()
            if content != seen:
                seen, seen_at = content, time.monotonic()

    def _take_over(self, stale: bytes) -> None:
        mine = self._path.with_name(f"{LOCK_NAME}-{self._owner['token']}")
        try:
            self._path.rename(mine)
        except FileNotFoundError:
            return
        if mine.read_bytes() != stale:
            with contextlib.suppress(OSError):  # a new lock was created since: that one counts
                self._path.hardlink_to(mine)
        else:
            self._say(f"{_owner_words(stale)} died while it filled {self._path.parent}; continuing from what it left")
        mine.unlink()


def _process_identity() -> dict[str, Any]:
    """Identify this process, so that others in the same PID namespace can see whether it still lives."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
        "namespace": _pid_namespace(),
    }


def _pid_namespace() -> str | None:
    """Kernel boot and PID namespace; None where /proc does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def _start_time(pid: int) -> str | None:
    """Field 22 of /proc/<pid>/stat; differs when a PID is reused."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _owner_is_dead_here(owner: dict[str, Any]) -> bool:
    if owner.get("namespace") is None or owner["namespace"] != _pid_namespace() or owner.get("started") is None:
        return False
    return isinstance(owner.get("pid"), int) and _start_time(owner["pid"]) != owner["started"]


def _owner_of(content: bytes | None) -> dict[str, Any]:
    try:
        owner = json.loads(content or b"{}").get("owner", {})
    except (ValueError, AttributeError, RecursionError):
        return {}  # half-written: its owner is alive, or the content does not change and becomes stale
    return owner if isinstance(owner, dict) else {}


def _owner_words(content: bytes | None) -> str:
    owner = _owner_of(content)
    return f"process {owner.get('pid', '?')} on {owner.get('host', 'another pod')}"
