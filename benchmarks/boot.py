"""From the start of `millstream serve` to Ready: import, weights, KV cache, warm-up, the first token.

The demo model, a new process a round, as the pod starts it. What counts is the wall time that somebody who waits sees,
from the fork to the first 200 of `/ready`; the ledger beside it is what `/ready` says of each phase. Against the
limit of runtime.md's table: six seconds. The page cache is warm from the second round on, as on a node that has the
image; the first round is told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import machine

RESULT = Path(__file__).parent / "results" / "boot.json"
DEMO_MODEL = Path(__file__).parent.parent / "models" / "demo-chat"
LIMIT_SECONDS = 6.0
GIVE_UP_SECONDS = 120.0
LOOK_SECONDS = 0.02


def boot_once(folder: Path) -> dict[str, Any]:
    """Start, wait for Ready, stop. `wall_seconds` and the phases that `/ready` tells."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "millstream", "serve", str(folder), f"--port={port}"]
    environment = {**os.environ, "MILLSTREAM_LOG_LEVEL": "warning"}
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as process:
        try:
            told = _wait_ready(f"http://127.0.0.1:{port}/ready", process, began + GIVE_UP_SECONDS)
            return {"wall_seconds": round(time.perf_counter() - began, 3), "boot_seconds": told.get("boot_seconds", {})}
        finally:
            process.send_signal(signal.SIGINT)


def _wait_ready(url: str, process: subprocess.Popen[bytes], until: float) -> dict[str, Any]:
    while time.perf_counter() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - loopback, http
                told: dict[str, Any] = json.loads(answer.read())
                return told
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(LOOK_SECONDS)
    raise RuntimeError(f"not Ready after {GIVE_UP_SECONDS:.0f} s")


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args(arguments).rounds
    runs = []
    for number in range(rounds):
        runs.append(boot_once(DEMO_MODEL))
        print(f"start {number + 1} of {rounds}: Ready after {runs[-1]['wall_seconds']:.2f} s", flush=True)
    walls = [run["wall_seconds"] for run in runs]
    median = statistics.median(walls[1:] or walls)
    result = {
        "model": DEMO_MODEL.name,
        "first_seconds": walls[0],
        "median_seconds": round(median, 3),
        "least_seconds": min(walls),
        "limit_seconds": LIMIT_SECONDS,
        "ratio_to_limit": round(median / LIMIT_SECONDS, 3),
        "phases_seconds": runs[-1]["boot_seconds"],
    }
    print(f"import to Ready: {median:.2f} s, {result['ratio_to_limit']:.2f} × the limit of {LIMIT_SECONDS:.0f} s")
    RESULT.write_text(json.dumps({"machine": machine.describe(), **result}, indent=2) + "\n")
    print(f"saved {RESULT}")


if __name__ == "__main__":
    main()
