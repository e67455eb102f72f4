"""An engine in its own process, over a socket pair: no path in the file system, so no other process can connect.

`python -m millstream_runtime.engine_process FD` is started with the socket as its only inherited file. Its end shows
twice: as the end of the stream, after which no event can come, and through `wait()`, which returns the exit code.

It leads a process group, in which the other ranks are: what is left of them is killed with it. They end by themselves
when it is gone, unless they are stopped or still load their libraries.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import threading
from collections import deque

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.host_limits import oom_kills
from millstream_runtime.engine_process.framing import FrameReader, FramingError, frame
from millstream_runtime.engine_process.messages import (
    Command,
    Event,
    Load,
    PromptLogprobs,
    StepDone,
    Stop,
    decode_event,
    encode,
)
from millstream_runtime.engine_process.prompt_parts import PromptParts
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.logs import log
from millstream_runtime.processes.exit_signal import killed_by
from millstream_runtime.processes.interpreter import module_command
from millstream_runtime.processes.memory_remedy import MEMORY_REMEDY
from millstream_runtime.server.engine.client import OnEnd, OnEvent
from millstream_runtime.server.engine.huge_pages import engine_environment

EXIT_GRACE_SECONDS = 1.0  # between the end of the stream and the end of the process, in either order
SOCKET_BUFFER_BYTES = 1 << 20  # a step's outputs never wait for an event loop that is busy for a moment
# Tokens that one iteration of the event loop delivers. Each costs up to 0.2 ms until it is sent, and a socket that was
# full holds thousands: an engine that is faster than HTTP would hold up probes and new requests.
MAX_OUTPUTS_PER_ITERATION = 64
ENGINE_MODULE = "millstream_runtime.engine_process"


class EngineProcessLauncher:
    """Launches engine processes with one configuration. `prepare` starts the first before there is an event loop."""

    def __init__(self, config: RuntimeConfig, module: str = ENGINE_MODULE) -> None:
        """`module`: what is run as `python -m module FD`."""
        self._config = config
        self._module = module
        self._prepared: _Spawned | None = None

    def prepare(self) -> None:
        """Start the first process, so that it imports torch (the longest import) while this process imports FastAPI."""
        self._prepared = _Spawned(self._config, self._module)

    def discard(self) -> None:
        """Kill a process that was prepared and never used."""
        if self._prepared is not None:
            _kill_group(self._prepared.process.pid)
            self._prepared.process.wait()
            self._prepared.link.close()
            self._prepared = None

    def __call__(self, on_event: OnEvent, on_end: OnEnd) -> EngineSubprocess:
        """See `client.EngineLauncher`."""
        spawned, self._prepared = self._prepared or _Spawned(self._config, self._module), None
        return EngineSubprocess(spawned, on_event, on_end)


class _Spawned:
    """A started process that has its `Load` command."""

    def __init__(self, config: RuntimeConfig, module: str) -> None:
        self.oom_kills_before = oom_kills()
        self.link, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with child_end:
            for end in (self.link, child_end):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            self.process = subprocess.Popen(
                module_command(module, str(child_end.fileno())),
                env=engine_environment(os.environ, config.device),  # the other ranks inherit it
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                # Its group is its own, and Ctrl-C on a terminal is for the HTTP process alone, which drains.
                start_new_session=True,
            )
        self.link.sendall(frame(encode(Load(config))))  # fits the socket buffer, so it does not wait for a reader
        self.link.setblocking(False)


class EngineSubprocess(asyncio.Protocol):
    """See `client.EngineConnection`. Created and used on the event loop."""

    def __init__(self, spawned: _Spawned, on_event: OnEvent, on_end: OnEnd) -> None:
        self._process, self._link = spawned.process, spawned.link
        self._oom_kills_before = spawned.oom_kills_before
        self._on_event = on_event
        self._on_end = on_end
        self._reader = FrameReader()
        self._arrived: deque[bytes] = deque()  # messages that wait for a further iteration of the event loop
        self._prompt_parts = PromptParts()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []  # until the transport exists, one iteration of the loop later
        self._stream_ended = False
        self._exit_code: int | None = None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._attaching = self._loop.create_task(self._attach(spawned.link))
        threading.Thread(target=self._wait, name="engine-exit", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._process.pid

    def send(self, command: Command) -> None:
        data = frame(encode(command))
        if self._transport is None:
            self._unsent.append(data)
        elif not self._stream_ended:
            self._transport.write(data)

    async def stop(self, timeout_seconds: float) -> bool:
        self.send(Stop())
        in_time = True
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_seconds)
        except TimeoutError:
            in_time = False
            self.kill()
            await self._ended.wait()
        return in_time

    async def _attach(self, link: socket.socket) -> None:
        await self._loop.create_connection(lambda: self, sock=link)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - what create_connection makes
        self._transport = transport
        transport.writelines(self._unsent)
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        self._take(data)
        self._deliver_some()

    def _take(self, data: bytes) -> None:
        try:
            self._arrived.extend(self._reader.feed(data))
        except FramingError as error:
            self._on_broken(error)

    def _deliver_some(self) -> None:
        """Deliver what one iteration may, and leave the rest to the next one; nothing further is read until then."""
        assert self._transport is not None  # noqa: S101 - it has received data
        self._deliver(MAX_OUTPUTS_PER_ITERATION)
        if self._arrived:
            self._transport.pause_reading()
            self._loop.call_soon(self._deliver_some)
        else:
            self._transport.resume_reading()

    def _deliver(self, most_outputs: float) -> None:
        """Deliver messages until they have `most_outputs` outputs; the last may have more."""
        try:
            while self._arrived and most_outputs > 0:
                event = decode_event(self._arrived.popleft())
                most_outputs -= _num_outputs(event)
                if isinstance(event, PromptLogprobs):
                    self._prompt_parts.add(event)
                else:
                    self._on_event(self._prompt_parts.complete(event) if isinstance(event, StepDone) else event)
        except ValueError as error:  # msgspec's errors are ValueErrors
            self._on_broken(error)

    def _on_broken(self, error: Exception) -> None:
        log.error("engine_stream_broken", error=str(error))
        self._arrived.clear()
        self.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream_ended = True
        self._deliver(math.inf)
        if self._exit_code is None:
            self._loop.call_later(EXIT_GRACE_SECONDS, self.kill)
        else:
            self._end()

    def _wait(self) -> None:
        with contextlib.suppress(ChildProcessError):  # its exit code was read already
            # Not reaped yet: until then its number, which is the group's, belongs to no other process.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            _kill_group(self._process.pid)
        code = self._process.wait()
        try:
            self._loop.call_soon_threadsafe(self._on_exit, code)
        except RuntimeError:  # the event loop has closed: this process is exiting
            return

    def _on_exit(self, code: int) -> None:
        self._exit_code = code
        if self._stream_ended:
            self._end()
        else:
            self._loop.call_later(EXIT_GRACE_SECONDS, self._read_the_rest)

    def _read_the_rest(self) -> None:
        """End with what the process said last, which a busy event loop may not have read within the grace."""
        with contextlib.suppress(OSError):  # nothing more for now, or the transport has closed the link
            while piece := self._link.recv(SOCKET_BUFFER_BYTES):
                self._take(piece)
        self._end()

    def _end(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._stream_ended = True
            self._deliver(math.inf)
            if self._transport is not None:
                self._transport.abort()
            assert self._exit_code is not None  # noqa: S101 - only called once it is known
            self._on_end(exit_failure(self._exit_code, out_of_memory=oom_kills() > self._oom_kills_before))

    def kill(self) -> None:
        """See `EngineConnection.kill`."""
        if self._exit_code is None:
            _kill_group(self._process.pid)


def _kill_group(leader_pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader_pid, signal.SIGKILL)


def _num_outputs(event: Event) -> int:
    match event:
        case StepDone(outputs):
            return len(outputs)
        case PromptLogprobs(entries=entries):  # as long as an answer's tokens, each
            return len(entries)
        case _:
            return 1


def exit_failure(exit_code: int, *, out_of_memory: bool) -> RuntimeFailure:
    """The failure that an exit code stands for. A negative code is the signal, as in `subprocess`."""
    if out_of_memory and exit_code == -signal.SIGKILL:
        return RuntimeFailure(
            FailureReason.OUT_OF_MEMORY,
            f"The kernel killed the engine because the container's memory limit was reached; {MEMORY_REMEDY}.",
        )
    if exit_code < 0:
        return RuntimeFailure(FailureReason.RUNTIME_CRASHED, f"The engine process {killed_by(exit_code)}.")
    return RuntimeFailure(
        FailureReason.RUNTIME_CRASHED, f"The engine process ended with exit code {exit_code}; see the log."
    )
