"""`python -m tests.support.hasty_engine FD`: an engine process that writes many steps at once, and ends."""

from __future__ import annotations

import socket
import sys

from millstream_runtime.engine.request import EngineStats, TokenOutput
from millstream_runtime.engine_process.framing import frame
from millstream_runtime.engine_process.messages import StepDone, encode

STEPS, SEQUENCES = 500, 4


def main(fd: int) -> None:
    """Write after the first command."""
    stats = EngineStats(1, 0, 10, 1, 16, 0, 1)
    outputs = tuple(TokenOutput(str(number), 7) for number in range(SEQUENCES))
    with socket.socket(fileno=fd) as link:
        link.recv(1 << 16)
        link.sendall(b"".join(frame(encode(StepDone(outputs, stats, float(step)))) for step in range(STEPS)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
