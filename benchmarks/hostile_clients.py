"""A thousand hostile clients, and one well-behaved client meanwhile: its time to the first token, memory, places.

    quiet_N    the well-behaved client alone
    hostile_N  the same while `--clients` hostile ones come (`tests/support/hostile_clients.py`): never reading, half
               heads, half bodies, cancels before and in the middle of an answer, pipelining, slow readers
    calm       until the server has closed what it closes

Quiet and hostile phases take turns, since the machine's speed changes: each hostile phase is compared with the quiet
one right before it, and the median of the ratios counts. A refused request of the well-behaved client counts as one
that takes for ever. Memory is that of the HTTP process when each quiet phase ends: the first rounds fill its caches, so
what counts is how much it grows from the second round on.

The hostile clients have a process of their own, so that their work is not in the times of the other. The engine
computes nothing (`scripted_engine`), takes 10 ms per step, as one GPU would, and runs 64 requests at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from benchmarks import machine
from benchmarks.scripted_engine import STEP_SECONDS_VARIABLE
from benchmarks.stalling_server import NICENESS
from tests.support.hostile_clients import HostileClient, hostile_crowd, visit_all
from tests.support.tiny_model import write_tiny_model

RESULT = Path(__file__).parent / "results" / "hostile_clients.json"
STEP_SECONDS = 0.01
ROUNDS = 3
BUDGET_RATIO = 2.0
FREE = ("millstream_admission_in_use", "millstream_answers_undelivered", "vllm:num_requests_running")


@dataclass
class Watch:
    """What the well-behaved client and the probe see, and the server's memory and connections, once a second."""

    address: str
    pid: int
    first_tokens_seconds: list[float] = field(default_factory=list)
    refused: int = 0
    not_ready: int = 0
    probes: int = 0
    resident_mib: list[float] = field(default_factory=list)
    connections: list[float] = field(default_factory=list)

    async def ask(self, until: asyncio.Event) -> None:
        """One short stream after another, each on a new connection."""
        body = json.dumps({"model": "bench", "prompt": "hi", "max_tokens": 4, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        asked = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
        while not until.is_set():
            began, first, received = time.perf_counter(), None, b""
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(self.address).port)
            writer.write(asked)
            while piece := await reader.read(1 << 16):
                received += piece
                if first is None and b"data: " in received:
                    first = time.perf_counter() - began
            writer.close()
            if first is None or b"data: [DONE]" not in received:
                self.refused += 1
                first = math.inf
            self.first_tokens_seconds.append(first)

    async def probe(self, until: asyncio.Event) -> None:
        """The readiness probe of a kubelet, and the server's memory."""
        while not until.is_set():
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(self.address).port)
            writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            self.probes += 1
            self.not_ready += not (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            self.resident_mib.append(resident_mib(self.pid))
            self.connections.append(await asyncio.to_thread(lambda: left_behind(self.address)["connections"]))
            await asyncio.sleep(1.0)

    def summary(self) -> dict[str, Any]:
        ranked = sorted(self.first_tokens_seconds)
        found = {f"p{share}": ranked[int(share / 100 * len(ranked))] for share in (50, 90, 99)}
        return {
            "requests": len(ranked),
            "refused": self.refused,
            "first_token_milliseconds": {name: _milliseconds(one) for name, one in found.items()},
            "most_connections": max(self.connections),
            "probes": self.probes,
            "not_ready": self.not_ready,
            "resident_mib_at_the_end": self.resident_mib[-1],
            "resident_mib_most": max(self.resident_mib),
        }


def _milliseconds(seconds: float) -> float | None:
    """None: it was refused."""
    return round(seconds * 1e3, 2) if seconds < math.inf else None


async def watched(address: str, pid: int, seconds: float, crowd: Crowd | None = None) -> dict[str, Any]:
    """One phase: `seconds`, and before them until the last of the crowd has left."""
    watch, over = Watch(address, pid), asyncio.Event()
    watching = [asyncio.create_task(watch.ask(over)), asyncio.create_task(watch.probe(over))]
    if crowd is not None:
        await crowd.visit(urlsplit(address).port or 0)
    await asyncio.sleep(seconds)
    over.set()
    await asyncio.gather(*watching)
    return watch.summary()


@dataclass
class Crowd:
    """Hostile clients in another process. `num_cut`: clients within their rights that were not served."""

    processes: Executor
    seed: int
    count: int
    phase_seconds: float
    outcomes: Counter[str] = field(default_factory=Counter)  # by misdeed
    num_cut: int = 0

    async def visit(self, port: int) -> None:
        """All of them come and leave."""
        loop, arguments = asyncio.get_running_loop(), (self.seed, self.count, self.phase_seconds, port)
        for client in await loop.run_in_executor(self.processes, visit_from_here, *arguments):
            self.outcomes[f"{client.misdeed.value}: {client.outcome}"] += 1
            self.num_cut += client.must_be_served and client.outcome != "served"


def visit_from_here(seed: int, count: int, phase_seconds: float, port: int) -> list[HostileClient]:
    """Be the crowd, in this process."""
    crowd = hostile_crowd(
        seed, count, arrive_within_seconds=phase_seconds, patience_seconds=phase_seconds, most_tokens=300
    )
    asyncio.run(visit_all(crowd, port, "bench"))
    for client in crowd:
        client.received.clear()
    return crowd


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 1)


def left_behind(address: str) -> dict[str, float]:
    """Places and requests that are still held, and open connections besides this one."""
    with urlopen(f"{address}/metrics", timeout=60) as answer:  # noqa: S310 - loopback
        page = answer.read().decode()
    found = {name: sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", page, re.M)) for name in FREE}
    connections = re.findall(r"^millstream_http_connections{.*} (\S+)$", page, re.MULTILINE)
    return {**found, "connections": sum(map(float, connections)) - 1}


def run(folder: Path, clients: int, rounds: int, phase_seconds: float) -> dict[str, Any]:
    """The phases against one server."""
    environment = {**os.environ, STEP_SECONDS_VARIABLE: str(STEP_SECONDS)}
    command = [sys.executable, "-m", "benchmarks.stalling_server", str(folder)]
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(1, mp_context=context) as processes,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server,
    ):
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        processes.submit(visit_from_here, 0, 0, 1.0, 0).result()  # it is started
        asyncio.run(watched(address, server.pid, 3.0))  # warm
        results: dict[str, Any] = {}
        outcomes: Counter[str] = Counter()
        for round_ in range(1, rounds + 1):
            results[f"quiet_{round_}"] = asyncio.run(watched(address, server.pid, phase_seconds))
            crowd = Crowd(processes, round_, clients, phase_seconds)
            found = asyncio.run(watched(address, server.pid, 3.0, crowd))
            results[f"hostile_{round_}"] = found | {"served_clients_that_were_cut": crowd.num_cut}
            outcomes.update(crowd.outcomes)
        results["calm"] = asyncio.run(watched(address, server.pid, phase_seconds))
        results["left_behind"] = left_behind(address)
        results["outcomes"] = dict(sorted(outcomes.items()))
        server.send_signal(signal.SIGINT)
        results["event_loop"] = json.loads(server.stdout.read().splitlines()[-1])
    return {**results, **compare(results, rounds)}


def compare(results: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Each hostile phase over the quiet one before it, None where requests were refused; memory from round to round."""

    def p99(phase: str) -> float:
        found = results[phase]["first_token_milliseconds"]["p99"]
        return math.inf if found is None else float(found)

    ratios = [p99(f"hostile_{round_}") / p99(f"quiet_{round_}") for round_ in range(1, rounds + 1)]
    phases = [*(f"quiet_{round_}" for round_ in range(1, rounds + 1)), "calm"]
    memory = [results[phase]["resident_mib_at_the_end"] for phase in phases]
    shown = [round(ratio, 2) if ratio < math.inf else None for ratio in [*ratios, statistics.median(ratios)]]
    return {
        "ratios_of_p99": shown[:-1],
        "ratio_of_p99": shown[-1],
        "refused": sum(results[f"hostile_{round_}"]["refused"] for round_ in range(1, rounds + 1)),
        "resident_mib_by_round": memory,
        "resident_mib_grown_after_the_first_round": round(memory[-1] - memory[min(1, len(memory) - 1)], 1),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile_clients", description=__doc__)
    parser.add_argument("--clients", type=int, default=1000, help="of each hostile phase")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="quiet and hostile phases in turn")
    parser.add_argument("--phase-seconds", type=float, default=40.0)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny_model(Path(scratch) / "tiny")
        results = run(folder, options.clients, options.rounds, options.phase_seconds)
    rounds = range(1, options.rounds + 1)
    for phase in (*(f"{kind}_{round_}" for round_ in rounds for kind in ("quiet", "hostile")), "calm"):
        one = results[phase]
        first_token = one["first_token_milliseconds"]
        print(
            f"{phase:9} p50 {first_token['p50']} ms, p99 {first_token['p99']} ms of {one['requests']}, "
            f"{one['refused']} refused, not ready {one['not_ready']} of {one['probes']}, "
            f"most connections {one['most_connections']:.0f}, memory {one['resident_mib_at_the_end']} MiB"
        )
    print(
        f"p99 {results['ratio_of_p99']} × the quiet one (budget {BUDGET_RATIO}; {results['ratios_of_p99']}; None: "
        f"refused); memory {results['resident_mib_by_round']} MiB; left behind {results['left_behind']}"
    )
    described = {**machine.describe(), "server_niceness": NICENESS, "open_files": most_files}
    settings = {"clients": options.clients, "step_milliseconds": STEP_SECONDS * 1e3}
    options.output.write_text(json.dumps({"machine": described, **settings, **results}, indent=2) + "\n")
    print(f"saved {options.output}")


if __name__ == "__main__":
    main()
