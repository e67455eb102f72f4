"""`python -m millstream_runtime.engine_process FD`: the engine process, started by `millstream serve` only.

    HTTP process (server/)                          engine process (this package, engine/, models/)
    FastAPI, tokenizer, metrics     --Command-->    EngineLoop: one Engine, one step after another
    no torch                        <--Event----    one message per step, whatever the batch

A step that holds the interpreter never delays an HTTP answer, and an engine that is killed takes no connection with it.

FD is one end of an inherited socket pair. The first message is `Load`: the configuration comes as a message and not as
arguments, so that it is checked again and appears in no process list. The end of the stream means that the HTTP process
has ended; this one then ends at once, in any phase. It handles no signals: the HTTP process handles the signal that
ends the pod, and its end is the end of this process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading

from millstream_runtime.engine_process.framing import FrameReader, frame
from millstream_runtime.engine_process.loop import EngineLoop, MakeEngine, load_engine
from millstream_runtime.engine_process.messages import Event, Failed, Load, decode_command, encode
from millstream_runtime.engine_process.prompt_parts import in_parts
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.logs import configure_logging
from millstream_runtime.processes.unblocked_stderr import unblock_standard_error

RECEIVE_BYTES = 1 << 16
STUCK_SECONDS = 10.0  # longer than an orderly shutdown of the ranks takes


def main(fd: int, make_engine: MakeEngine = load_engine) -> int:
    """Serve the socket `fd` until `Stop`, the stream's end or a failure; the exit code."""
    unblock_standard_error()
    configure_logging("warning")  # the HTTP process logs the phases
    link = socket.socket(fileno=fd)
    link.set_inheritable(False)  # a process that the engine starts must not keep the stream open after its death
    engine_loop = EngineLoop(
        lambda event: _send(link, event), make_engine, on_lost=lambda failure: _exit_soon(link, failure)
    )
    reader = FrameReader()
    commands: list[Load] = []
    while not commands:
        for payload in reader.feed(_receive(link)):
            command = decode_command(payload)
            if isinstance(command, Load):
                commands.append(command)
            else:
                engine_loop.put(command)
    threading.Thread(target=_read_commands, args=(link, reader, engine_loop), name="commands", daemon=True).start()
    return 0 if engine_loop.run(commands[0].config) else 1


def _read_commands(link: socket.socket, reader: FrameReader, engine_loop: EngineLoop) -> None:
    try:
        while True:
            for payload in reader.feed(_receive(link)):
                engine_loop.put(decode_command(payload))
    finally:
        os._exit(1)  # a stream that cannot be read will never say Stop


def _receive(link: socket.socket) -> bytes:
    piece = link.recv(RECEIVE_BYTES)
    if not piece:
        os._exit(0)  # the HTTP process is gone
    return piece


def _exit_soon(link: socket.socket, failure: RuntimeFailure) -> None:
    """End this process after a rank is lost, in case the loop is stuck on the device waiting for that rank."""

    def exit_now() -> None:
        _send(link, Failed(failure.reason, failure.message))
        os._exit(1)

    timer = threading.Timer(STUCK_SECONDS, exit_now)
    timer.daemon = True
    timer.start()


def _send(link: socket.socket, event: Event) -> None:
    try:
        for message in in_parts(event):
            link.sendall(frame(encode(message)))
    except OSError:
        os._exit(0)


if __name__ == "__main__":
    code = 1
    with contextlib.suppress(KeyboardInterrupt):
        code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # skip the interpreter's shutdown, which threads inside torch can block
