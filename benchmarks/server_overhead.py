"""What HTTP adds to a request: from the first byte of the question to the last of the answer, minus the engine's time.

whole      one chat completion of 1 and of 32 tokens on a kept connection, one after another. The engine's time is what
           the server itself reports (`vllm:request_inference_time_seconds`: from the first place in a batch to the last
           token), so the overhead is HTTP, validation, template, tokenizer, both ways over the socket, JSON, and what
           little a client on raw sockets adds.
streamed   the same as server-sent events, and what a token costs in processor time of the HTTP process.
process    memory and imports of the HTTP process alone.

Wall time suffers from whatever else the machine runs; processor time of the HTTP process hardly does.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from benchmarks import machine
from tests.support.tiny_model import write_tiny_model

RESULT = Path(__file__).parent / "results" / "server_overhead.json"
DEMO_MODEL = Path(__file__).parent.parent / "models" / "demo-chat"
BUDGET_MILLISECONDS = 2.0
ROUNDS, REQUESTS_PER_ROUND = 9, 20
QUESTION = "What is a Kubernetes pod, and how does a Deployment make sure that three of them are always running?"


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int]]:
    """A server as `millstream serve` starts it; its address and the HTTP process's id."""
    command = [sys.executable, "-m", "millstream", "serve", str(folder), "--port=0", "--served-model-name=bench"]
    command += ["--kv-cache-memory-bytes=67108864", "--enable-prefix-caching=false"]
    environment = {**os.environ, "MILLSTREAM_LOG_LEVEL": "warning"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        told = ""
        for line in process.stderr:
            told += line
            if found := re.search(r"Ready in .* at (http://\S+)/v1", line):
                yield found[1], process.pid
                break
        else:
            raise RuntimeError(f"the server never became Ready:\n{told}")
        process.send_signal(signal.SIGINT)


class Client:
    """One kept connection, and as little of its own work a request as can be: what it does counts as overhead."""

    def __init__(self, url: str) -> None:
        self._url = url
        host, _, port = urlsplit(url).netloc.partition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=120)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def chat(self, new_tokens: int, *, stream: bool) -> None:
        """Ask and read the whole answer."""
        self._socket.sendall(_question(new_tokens, stream=stream))
        answer = b""
        while not _is_whole(answer):
            piece = self._socket.recv(1 << 16)
            if not piece:
                raise RuntimeError(f"the server hung up after {answer!r}")
            answer += piece
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer.decode())

    def engine_seconds(self) -> float:
        """Sum over all requests so far."""
        with urlopen(f"{self._url}/metrics", timeout=120) as answer:  # noqa: S310 - loopback
            page = answer.read().decode()
        found = re.search(r"^vllm:request_inference_time_seconds_sum{.*} (\S+)$", page, re.MULTILINE)
        return float(found[1]) if found else 0.0


@cache
def _question(new_tokens: int, *, stream: bool) -> bytes:
    body = json.dumps(
        {
            "model": "bench",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


def _is_whole(answer: bytes) -> bool:
    """By its length, or by the end of its chunks."""
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return len(body) == int(found[1]) if found else body.endswith(b"0\r\n\r\n")


def processor_seconds(pid: int) -> float:
    """User and system time of the threads of a process (schedstat: nanoseconds on a core)."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def measure(url: str, pid: int, new_tokens: int, *, stream: bool) -> dict[str, float]:
    """Milliseconds a request: each round gives a mean, and the median of the rounds counts."""
    client = Client(url)
    for _ in range(REQUESTS_PER_ROUND):
        client.chat(new_tokens, stream=stream)
    walls, overheads, used = [], [], 0.0
    for _ in range(ROUNDS):
        engine, began, start = client.engine_seconds(), processor_seconds(pid), time.perf_counter()
        for _ in range(REQUESTS_PER_ROUND):
            client.chat(new_tokens, stream=stream)
        wall = (time.perf_counter() - start) / REQUESTS_PER_ROUND
        used += processor_seconds(pid) - began  # without the scrapes, which cost as much as several requests
        walls.append(wall * 1e3)
        overheads.append((wall - (client.engine_seconds() - engine) / REQUESTS_PER_ROUND) * 1e3)
    return {
        "wall_milliseconds": round(statistics.median(walls), 3),
        "overhead_milliseconds": round(statistics.median(overheads), 3),
        "least_overhead_milliseconds": round(min(overheads), 3),
        "http_process_milliseconds": round(used / (ROUNDS * REQUESTS_PER_ROUND) * 1e3, 3),
    }


def http_process() -> dict[str, Any]:
    """What importing everything that the HTTP process needs costs, and what it leaves in memory."""
    program = (
        "import time; began = time.perf_counter()\n"
        "import millstream.commands.serve, millstream_runtime.server.engine.subprocess, sys\n"
        "import millstream_runtime.server.model_server\n"
        "seconds = time.perf_counter() - began\n"
        "rss = int(open('/proc/self/statm').read().split()[1]) * __import__('os').sysconf('SC_PAGE_SIZE')\n"
        "print(seconds, rss, 'torch' in sys.modules)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    ]
    return {
        "import_seconds": round(min(float(run[0]) for run in runs), 3),
        "resident_bytes": int(runs[0][1]),
        "imports_torch": runs[0][2] == "True",
    }


def main() -> None:
    """Measure, print, save."""
    results: dict[str, Any] = {"http_process": http_process()}
    print(f"HTTP process: {results['http_process']}")
    with tempfile.TemporaryDirectory() as scratch:
        has_demo = (DEMO_MODEL / "config.json").exists()
        folder = DEMO_MODEL if has_demo else write_tiny_model(Path(scratch) / "tiny")
        results["model"] = folder.name
        with serving(folder) as (url, pid):
            for stream in (False, True):
                for new_tokens in (1, 32):
                    name = f"{'streamed' if stream else 'whole'}-{new_tokens}"
                    results[name] = one = measure(url, pid, new_tokens, stream=stream)
                    print(
                        f"{name:12} wall {one['wall_milliseconds']:8.2f} ms   overhead "
                        f"{one['overhead_milliseconds']:6.2f} ms (least {one['least_overhead_milliseconds']:.2f})   "
                        f"processor time of HTTP {one['http_process_milliseconds']:.2f} ms",
                        flush=True,
                    )
    results["ratio_to_budget"] = round(results["whole-1"]["overhead_milliseconds"] / BUDGET_MILLISECONDS, 3)
    print(f"overhead of a whole answer: {results['ratio_to_budget']:.2f} × the budget of {BUDGET_MILLISECONDS} ms")
    RESULT.write_text(json.dumps({"machine": machine.describe(), **results}, indent=2) + "\n")
    print(f"saved {RESULT}")


if __name__ == "__main__":
    main()
