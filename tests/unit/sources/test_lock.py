"""The folder lock: one owner, a dead owner's lock is taken over, a live one's never, a silent owner stops itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.sources import lock as lock_module
from millstream_runtime.sources.lock import LOCK_NAME, FolderLock, LockTimes

QUICK = LockTimes(beat_seconds=0.02, fence_seconds=60.0, stale_seconds=120.0, poll_seconds=0.01)
IMPATIENT = LockTimes(beat_seconds=0.02, fence_seconds=60.0, stale_seconds=0.3, poll_seconds=0.01)


def ignore(_: str) -> None:
    """Nobody listens."""


def foreign_lock(folder: Path, beat: int = 0) -> None:
    owner = {"host": "other-pod", "pid": 1, "namespace": "another kernel", "started": "1", "token": "theirs"}
    (folder / LOCK_NAME).write_text(json.dumps({"owner": owner, "beat": beat}))


def test_many_take_turns(tmp_path: Path) -> None:
    inside, most = 0, 0
    gate = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with FolderLock(tmp_path, ignore, QUICK) as lock:
            with gate:
                inside += 1
                most = max(most, inside)
            lock.guard()
            time.sleep(0.01)
            with gate:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 1
    assert not list(tmp_path.iterdir())


def test_an_owner_on_another_node_that_fell_silent_is_replaced(tmp_path: Path) -> None:
    foreign_lock(tmp_path)
    said: list[str] = []
    with FolderLock(tmp_path, said.append, IMPATIENT) as lock:
        lock.guard()
    assert "waiting for process 1 on other-pod" in said[0]
    assert "died" in said[1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "{", "[" * 4096, '{"owner": 7}', "\xff"])
def test_what_no_owner_wrote_is_waited_for_like_the_lock_of_another_node(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_NAME).write_bytes(content.encode("latin-1"))
    with FolderLock(tmp_path, ignore, IMPATIENT) as lock:
        lock.guard()


def test_an_owner_that_beats_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a time of its own, in which the owner beats at each look of the waiter and then releases the lock."""
    times = LockTimes(beat_seconds=3600.0, fence_seconds=1.0, stale_seconds=2.0, poll_seconds=0.5)
    foreign_lock(tmp_path)
    now, looks = 0.0, 0

    def sleep(seconds: float) -> None:
        nonlocal now, looks
        now, looks = now + seconds, looks + 1
        if looks < 10:
            foreign_lock(tmp_path, looks)
        else:
            (tmp_path / LOCK_NAME).unlink()

    monkeypatch.setattr(lock_module, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now))
    said: list[str] = []
    with FolderLock(tmp_path, said.append, times) as lock:
        assert lock.is_held()
    assert looks == 10, "five seconds are longer than a silence that counts as death"
    assert len(said) == 1, "nobody died"


def test_a_killed_process_on_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from millstream_runtime.sources.lock import FolderLock\n"
        f"with FolderLock(Path({str(tmp_path)!r}), print):\n"
        "    print('mine', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        process.kill()
        process.wait()
    patient = LockTimes(stale_seconds=3600.0, poll_seconds=0.01)
    with FolderLock(tmp_path, ignore, patient) as lock:
        lock.guard()


def wait_until_lost(lock: FolderLock) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            lock.guard()
        except RuntimeFailure:
            return
        time.sleep(0.01)


def test_an_owner_whose_lock_was_taken_away_may_not_write(tmp_path: Path) -> None:
    with FolderLock(tmp_path, ignore, QUICK) as lock:
        foreign_lock(tmp_path)
        wait_until_lost(lock)
        with pytest.raises(RuntimeFailure, match="could not be kept locked"):
            lock.guard()
    assert (tmp_path / LOCK_NAME).exists(), "the other's lock is not ours to remove"


def test_an_owner_that_cannot_beat_may_not_write(tmp_path: Path) -> None:
    never = LockTimes(beat_seconds=3600.0, fence_seconds=0.05, stale_seconds=7200.0, poll_seconds=0.01)
    with FolderLock(tmp_path, ignore, never) as lock:
        time.sleep(0.1)
        with pytest.raises(RuntimeFailure, match="could not be kept locked"):
            lock.guard()


def test_the_lock_names_its_owner(tmp_path: Path) -> None:
    with FolderLock(tmp_path, ignore, QUICK):
        owner = json.loads((tmp_path / LOCK_NAME).read_text())["owner"]
        assert owner["pid"] == os.getpid()
