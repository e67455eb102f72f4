"""`python -m tests.support.engine_that_names_its_tunables FD`: an engine that reports its GLIBC_TUNABLES, and ends."""

from __future__ import annotations

import os
import socket
import sys

from millstream_runtime.boot import Phase
from millstream_runtime.engine_process.framing import frame
from millstream_runtime.engine_process.messages import PhaseEntered, encode

if __name__ == "__main__":
    link = socket.socket(fileno=int(sys.argv[1]))
    link.sendall(frame(encode(PhaseEntered(Phase.LOADING_WEIGHTS, os.environ.get("GLIBC_TUNABLES", "")))))
    os._exit(1)
