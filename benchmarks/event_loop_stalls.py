"""How long the event loop of the HTTP process stalls under streams that come as fast as it can send them.

streams    32 streams of 64k tokens each, from an engine that computes nothing (`scripted_engine`).
logprobs   4 whole answers of 64k tokens with log-probabilities, together with 8 such streams.
prompts    the log-probabilities of 4 prompts of 8k tokens with 20 alternatives, together with 8 such streams.

The clients read raw sockets in this process and count what comes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import machine
from benchmarks.scripted_engine import TOKEN_IDS
from benchmarks.stalling_server import NICENESS
from tests.support.tiny_model import write_tiny_model

RESULT = Path(__file__).parent / "results" / "event_loop_stalls.json"
BUDGET_MILLISECONDS = 20.0
TOKENS = 1 << 16
PROMPT_TOKENS, ALTERNATIVES = 1 << 13, 20


def chat(*, tokens: int, stream: bool, logprobs: bool) -> bytes:
    """A chat completion on a connection of its own."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": tokens, "stream": stream, "logprobs": logprobs}
    return request("/v1/chat/completions", body)


def scored_prompt() -> bytes:
    """A completion of one token, with the log-probabilities of its long prompt."""
    body = {"prompt": [TOKEN_IDS[0]] * PROMPT_TOKENS, "max_tokens": 1, "prompt_logprobs": ALTERNATIVES}
    return request("/v1/completions", body)


def request(route: str, body: dict[str, Any]) -> bytes:
    """A request that closes its connection."""
    payload = json.dumps({"model": "bench", **body}).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(payload)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + payload


async def answer(address: str, asked: bytes) -> tuple[int, bytes]:
    """Bytes of an answer, and its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(address).port, limit=1 << 20)
    writer.write(asked)
    received, end = 0, b""
    while piece := await reader.read(1 << 18):
        if not received and not piece.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(piece.decode())
        received += len(piece)
        end = (end + piece)[-2048:]
    writer.close()
    return received, end


async def load(address: str, streams: int, wholes: int, prompts: int, tokens: int) -> int:
    """Send all at once; bytes received in all."""
    asked = [(chat(tokens=tokens, stream=True, logprobs=False), b"data: [DONE]")] * streams
    asked += [(chat(tokens=tokens, stream=False, logprobs=True), b'"completion_tokens":%d' % tokens)] * wholes
    asked += [(scored_prompt(), b'"completion_tokens":1')] * prompts
    answers = await asyncio.gather(*(answer(address, one) for one, _ in asked))
    for (_, expected), (_, end) in zip(asked, answers, strict=True):
        if expected not in end:
            raise RuntimeError(f"an answer is not complete: {end!r}")
    return sum(received for received, _ in answers)


def measure(folder: Path, streams: int, wholes: int, prompts: int, tokens: int) -> dict[str, Any]:
    """One server, one load."""
    command = [sys.executable, "-m", "benchmarks.stalling_server", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        began = time.monotonic()
        received = asyncio.run(load(address, streams, wholes, prompts, tokens))
        seconds = time.monotonic() - began
        server.send_signal(signal.SIGINT)
        lags = json.loads(server.stdout.read().splitlines()[-1])
    answers = streams + wholes
    return {
        "streams": streams,
        "whole_answers": wholes,
        "scored_prompts": prompts,
        "tokens_each": tokens,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(answers * tokens / seconds),
        "received_bytes": received,
        **lags,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.event_loop_stalls", description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of each answer")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny_model(Path(scratch) / "tiny")
        for name, counts in (("streams", (32, 0, 0)), ("logprobs", (8, 4, 0)), ("prompts", (8, 0, 4))):
            results[name] = one = measure(folder, *counts, options.tokens)
            print(
                f"{name:9} {one['tokens_per_second']:>7} tokens/s   lag p99.9 {one['lag_p99.9_milliseconds']:.1f} ms, "
                f"max {one['lag_max_milliseconds']:.1f} ms   own work p99.9 {one['work_p99.9_milliseconds']:.1f} ms, "
                f"max {one['work_max_milliseconds']:.1f} ms (budget {BUDGET_MILLISECONDS} ms)",
                flush=True,
            )
    described = {**machine.describe(), "server_niceness": NICENESS}
    options.output.write_text(json.dumps({"machine": described, **results}, indent=2) + "\n")
    print(f"saved {options.output}")


if __name__ == "__main__":
    main()
