"""`python -m tests.support.hasty_engine FD`: an engine process that writes many steps at once, and ends.

The last of them ends a long prompt whose log-probabilities are wanted.
"""

from __future__ import annotations

import socket
import sys

from millstream_runtime.engine.request import EngineStats, Prefill, TokenLogprobs, TokenOutput
from millstream_runtime.engine_process.framing import frame
from millstream_runtime.engine_process.messages import StepDone, encode
from millstream_runtime.engine_process.prompt_parts import in_parts

STEPS, SEQUENCES, PROMPT_TOKENS = 500, 4, 1000


def main(fd: int) -> None:
    """Write after the first command."""
    stats = EngineStats(1, 0, 10, 1, 16, 0, 1)
    outputs = tuple(TokenOutput(str(number), 7) for number in range(SEQUENCES))
    prompt = (None, *(TokenLogprobs(token, -0.5, 1, ()) for token in range(1, PROMPT_TOKENS)))
    first_token = TokenOutput("long", 7, prefill=Prefill(0.0, 0, prompt))
    steps = [StepDone(outputs, stats, float(step)) for step in range(STEPS)]
    steps.append(StepDone((first_token,), stats, float(STEPS)))
    with socket.socket(fileno=fd) as link:
        link.recv(1 << 16)
        link.sendall(b"".join(frame(encode(message)) for step in steps for message in in_parts(step)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
