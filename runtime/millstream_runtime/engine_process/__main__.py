"""`python -m millstream_runtime.engine_process FD`: the engine process. Nobody but `millstream serve` starts it.

FD is one end of a socket pair that it inherited. The first message is `Load`; the configuration comes that way and not
as arguments, so that it is checked once more and stands in no process list. The end of the stream means that the HTTP
process has gone: this one ends then, at once, in whatever phase it is. It has no signal handling of its own: a signal
that ends the pod is the HTTP process's to answer, and that one's end is this one's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading

from millstream_runtime.engine_process.framing import FrameReader, frame
from millstream_runtime.engine_process.loop import EngineLoop
from millstream_runtime.engine_process.messages import Event, Failed, Load, decode_command, encode
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.logs import configure_logging

RECEIVE_BYTES = 1 << 16
STUCK_SECONDS = 10.0  # longer than ranks take to be ended in good order


def main(fd: int) -> int:
    """Serve the socket `fd` until `Stop`, the stream's end or a failure; the exit code."""
    configure_logging("warning")  # phases are logged by the HTTP process, which hears of them first
    link = socket.socket(fileno=fd)
    link.set_inheritable(False)  # a process that the engine starts must not keep the stream open after its death
    engine_loop = EngineLoop(lambda event: _send(link, event), on_lost=lambda failure: _leave_soon(link, failure))
    reader = FrameReader()
    commands: list[Load] = []
    while not commands:
        for payload in reader.feed(_receive(link)):
            command = decode_command(payload)
            if isinstance(command, Load):
                commands.append(command)
            else:
                engine_loop.put(command)
    threading.Thread(target=_read_on, args=(link, reader, engine_loop), name="commands", daemon=True).start()
    return 0 if engine_loop.run(commands[0].config) else 1


def _read_on(link: socket.socket, reader: FrameReader, engine_loop: EngineLoop) -> None:
    try:
        while True:
            for payload in reader.feed(_receive(link)):
                engine_loop.put(decode_command(payload))
    finally:
        os._exit(1)  # a stream that cannot be read will never say Stop


def _receive(link: socket.socket) -> bytes:
    piece = link.recv(RECEIVE_BYTES)
    if not piece:
        os._exit(0)  # the HTTP process is gone: nobody is left to work for
    return piece


def _leave_soon(link: socket.socket, failure: RuntimeFailure) -> None:
    """A rank is gone. The loop says so and ends, unless it waits on the device for that rank: then this does."""

    def leave() -> None:
        _send(link, Failed(failure.reason, failure.message))
        os._exit(1)

    timer = threading.Timer(STUCK_SECONDS, leave)
    timer.daemon = True
    timer.start()


def _send(link: socket.socket, event: Event) -> None:
    try:
        link.sendall(frame(encode(event)))
    except OSError:
        os._exit(0)


if __name__ == "__main__":
    code = 1
    with contextlib.suppress(KeyboardInterrupt):
        code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # without the interpreter's shutdown, which threads inside torch can hold up
