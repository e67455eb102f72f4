"""`python -m tests.support.engine_with_a_stopped_child FD`: an engine that dies and leaves a stopped process behind.

As an engine whose rank was stopped: the pid of the child is its only word, in a message of a phase.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from millstream_runtime.boot import Phase
from millstream_runtime.engine_process.framing import frame
from millstream_runtime.engine_process.messages import PhaseEntered, encode

if __name__ == "__main__":
    link = socket.socket(fileno=int(sys.argv[1]))
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    child.send_signal(signal.SIGSTOP)
    link.sendall(frame(encode(PhaseEntered(Phase.LOADING_WEIGHTS, str(child.pid)))))
    os._exit(1)
