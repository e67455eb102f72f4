"""Rank 0's side: starts the other ranks, sends them each step, and notices at once when one is gone.

A rank that dies closes its end of the link, and the thread that listens there reports it: so an idle engine learns it
as soon as a busy one. A rank that lives and does not answer runs into the timeout of the exchange it misses (gloo), or
of the step (NCCL). Either way `on_lost` is called once, with the reason of the rank that knows it best, and the running
step ends with the same failure. Ranks are not started again one by one: the survivors' state is half a step's.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from millstream_runtime.distributed import process_group
from millstream_runtime.distributed.channel import Channel
from millstream_runtime.distributed.idle_time import IdleTime
from millstream_runtime.distributed.messages import (
    Command,
    GraphRecorded,
    Join,
    Joined,
    Leave,
    Measured,
    RankFailed,
    Reply,
    ShardLoaded,
)
from millstream_runtime.distributed.probe import choose_small_sums, find_topology
from millstream_runtime.distributed.topology import Topology
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.processes.exit_signal import killed_by
from millstream_runtime.processes.interpreter import module_command

FOLLOWER_MODULE = "millstream_runtime.distributed.follower"
EXCHANGE_TIMEOUT_SECONDS = 120.0
# A rank that starts or loads may take as long as it computes; a volume may fail over in between.
IDLE_LOAD_SECONDS = 300.0
LOOK_SECONDS = 1.0
EXIT_GRACE_SECONDS = 0.5  # between the first rank's end and the reason: the rank at fault may not end first
NOTICE_SECONDS = 5.0  # for a death to show after an exchange has failed
LEAVE_SECONDS = 5.0

Kind = TypeVar("Kind", Joined, ShardLoaded, Measured, GraphRecorded)


class Leader:
    """See `engine.rank_group.RankGroup`."""

    def __init__(
        self,
        size: int,
        device: torch.device,
        *,
        exchange_timeout_seconds: float = EXCHANGE_TIMEOUT_SECONDS,
        idle_load_seconds: float = IDLE_LOAD_SECONDS,
        follower_module: str = FOLLOWER_MODULE,
    ) -> None:
        """Start ranks 1 to `size - 1` and meet them. `idle_load_seconds`: without processor time while it starts or
        loads, a rank counts as stuck. `follower_module`: what runs them.

        Raises:
            RuntimeFailure: NCCLFailed, or what one of them failed with.
        """
        self.on_lost: Callable[[RuntimeFailure], None] = lambda failure: None
        self._exchange_timeout_seconds = exchange_timeout_seconds
        self._idle_load_seconds = idle_load_seconds
        self._lost: list[_Rank] = []
        self._stuck: RuntimeFailure | None = None
        self._some_lost = threading.Event()
        self._closing = threading.Event()
        self._computing_since: float | None = None
        self._lock = threading.Lock()
        self._was_reported = False
        self._folder = Path(tempfile.mkdtemp(prefix="millstream-ranks-"))  # for this user alone
        lifeline, self._lifeline = os.pipe()
        self._ranks = [_Rank(number, lifeline, self._on_end, follower_module) for number in range(1, size)]
        os.close(lifeline)
        try:
            self._meet(size, device)
        except BaseException:
            self.close()
            raise
        if device.type == "cuda":
            threading.Thread(target=self._watch_deadline, name="rank-deadline", daemon=True).start()

    def _meet(self, size: int, device: torch.device) -> None:
        rendezvous = self._folder / "store"
        with contextlib.suppress(OSError):  # a rank that is gone is reported by `gather`
            for rank in self._ranks:
                rank.link.send(Join(rank.number, size, device.type, str(rendezvous), self._exchange_timeout_seconds))
        self.gather(Joined)
        with self.computing():
            self.ranks = process_group.join(0, size, device, rendezvous, self._exchange_timeout_seconds)
            topology = find_topology(self.ranks, device)
            self.topology: Topology = choose_small_sums(self.ranks, device, topology)

    @property
    def is_lost(self) -> bool:
        """Whether a rank is gone or stuck."""
        return self._some_lost.is_set()

    def check(self) -> None:
        if self.is_lost:
            raise self._loss()

    def broadcast(self, command: Command) -> None:
        try:
            for rank in self._ranks:
                rank.link.send(command)
        except OSError:
            raise self._loss() from None

    def gather(self, kind: type[Kind]) -> list[Kind]:
        # How long a share takes to load, its disk says; the rest takes others no longer than this rank, which is done.
        receive = self._receive_while_loading if kind in (Joined, ShardLoaded) else self._receive
        replies: list[Kind] = []
        for rank in self._ranks:
            reply = receive(rank)
            if not isinstance(reply, kind):
                raise self._loss()
            replies.append(reply)
        return replies

    def _receive(self, rank: _Rank) -> Reply | None:
        try:
            return rank.inbox.get(timeout=self._exchange_timeout_seconds)
        except queue.Empty:
            raise RuntimeFailure(
                FailureReason.NCCL_FAILED,
                f"Rank {rank.number} did not answer in {self._exchange_timeout_seconds:.0f} s: it is stuck.",
            ) from None

    def _receive_while_loading(self, rank: _Rank) -> Reply | None:
        idle = IdleTime(rank.process.pid)
        while True:
            with contextlib.suppress(queue.Empty):
                return rank.inbox.get(timeout=LOOK_SECONDS)
            if idle.look(LOOK_SECONDS) >= self._idle_load_seconds:
                raise RuntimeFailure(
                    FailureReason.NCCL_FAILED,
                    f"Rank {rank.number} has computed nothing for {self._idle_load_seconds:.0f} s while it loads: it "
                    "is stopped, or the volume with the model does not answer.",
                )

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        self._computing_since = time.monotonic()
        try:
            yield
        except (RuntimeFailure, RuntimeError) as error:
            about_ranks = not isinstance(error, RuntimeFailure) or error.reason is FailureReason.NCCL_FAILED
            if about_ranks and self._some_lost.wait(NOTICE_SECONDS):
                raise self._loss() from error
            raise
        finally:
            self._computing_since = None

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.link.send(Leave())
        deadline = time.monotonic() + LEAVE_SECONDS
        if hasattr(self, "ranks"):
            self.ranks.leave(after_a_loss=self.is_lost)
        os.close(self._lifeline)  # ends those that did not receive Leave
        for rank in self._ranks:
            rank.end(max(0.1, deadline - time.monotonic()))
        shutil.rmtree(self._folder, ignore_errors=True)

    def _on_end(self, rank: _Rank) -> None:
        """Report the end of `rank`; called by the thread that listened to it."""
        if self._closing.is_set():
            return
        with self._lock:
            self._lost.append(rank)
        self._some_lost.set()
        self._report_loss()

    def _watch_deadline(self) -> None:
        """Report a step that takes too long: NCCL waits on the device, where no exception can end it."""
        while not self._closing.wait(1.0):
            since = self._computing_since
            if since is not None and time.monotonic() - since > self._exchange_timeout_seconds:
                self._stuck = RuntimeFailure(
                    FailureReason.NCCL_FAILED,
                    f"A step did not end within {self._exchange_timeout_seconds:.0f} s: a rank or the way to it is "
                    "stuck; NCCL's messages are in the log (NCCL_DEBUG=INFO for more).",
                )
                self._some_lost.set()
                self._report_loss()
                return

    def _report_loss(self) -> None:
        with self._lock:
            if self._was_reported:
                return
            self._was_reported = True
        loss = self._loss()
        if hasattr(self, "ranks"):
            self.ranks.abort()
        if not self._closing.is_set():
            self.on_lost(loss)

    def _loss(self) -> RuntimeFailure:
        """Return why the ranks cannot continue: a reason that a rank sent, else that one was killed, else unknown."""
        self._some_lost.wait(NOTICE_SECONDS)
        time.sleep(EXIT_GRACE_SECONDS)
        with self._lock:
            lost = list(self._lost)
        reported = [
            rank.failed
            for rank in lost
            if rank.failed is not None and rank.failed.reason is not FailureReason.NCCL_FAILED
        ]
        if reported:
            return reported[0].as_failure()
        silent = [rank for rank in lost if rank.failed is None]
        if silent:
            return silent[0].exit_failure()
        nccl_failures = [rank.failed for rank in lost if rank.failed is not None]
        if nccl_failures:
            return nccl_failures[0].as_failure()
        return self._stuck or RuntimeFailure(FailureReason.NCCL_FAILED, "A rank is gone for an unknown reason.")


class _Rank:
    """One other process, and the thread that listens to it."""

    def __init__(self, number: int, lifeline: int, on_end: Callable[[_Rank], None], module: str) -> None:
        self.number = number
        mine, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                module_command(module, str(theirs.fileno()), str(lifeline)),
                pass_fds=(theirs.fileno(), lifeline),
                stdin=subprocess.DEVNULL,
            )
        self.link: Channel[Command, Reply] = Channel(mine, Reply)
        self.inbox: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        self.failed: RankFailed | None = None
        self._on_end = on_end
        self._listener = threading.Thread(target=self._listen, name=f"rank-{number}", daemon=True)
        self._listener.start()

    def exit_failure(self) -> RuntimeFailure:
        """Return the failure by the exit of the process, which sent none itself."""
        code = self.process.poll()
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = killed_by(code) + (" (often for want of memory)" if -code == signal.SIGKILL else "")
        else:
            how = f"ended with exit code {code}; see the log"
        return RuntimeFailure(FailureReason.NCCL_FAILED, f"Rank {self.number} {how}.")

    def end(self, timeout_seconds: float) -> None:
        try:
            self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join(timeout_seconds)
        self.link.close()

    def _listen(self) -> None:
        try:
            while (reply := self.link.receive()) is not None:
                if isinstance(reply, RankFailed):
                    self.failed = reply
                else:
                    self.inbox.put(reply)
        except ValueError:
            self.process.kill()  # it sent no valid message
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_GRACE_SECONDS)
        self._on_end(self)
        self.inbox.put(None)
