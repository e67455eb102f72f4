"""`python -m benchmarks.stalling_server FOLDER`: a server with a scripted engine that measures its own event loop.

A timer is due every 5 ms. How late it comes is how long a request or a probe would have waited at that moment:

    due ──── late ────▶ called        lag: the lateness
                                      work: the part of it in which the loop's own thread had a core

The difference is the rest of the machine. The first line that it prints is its address; after SIGINT it prints the lags
as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

from millstream_runtime.boot import BootLedger, BootSnapshot, Phase
from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.server.engine.subprocess import EngineProcessLauncher
from millstream_runtime.server.http.sockets import bind
from millstream_runtime.server.model_server import ModelServer
from millstream_runtime.server.operations.garbage_collector import freeze_gc

PERIOD_SECONDS = 0.005
NICENESS = -5  # the machine does other things; this process goes first where that is allowed


class LagMeter:
    """Lateness of a timer on this event loop, and processor time of its thread meanwhile.

    It counts hundredths of a millisecond: a list of all samples would grow by 1 MiB per 80 s, in the process whose
    memory `hostile_clients` measures.
    """

    def __init__(self) -> None:
        self.lags: Counter[int] = Counter()  # in hundredths of a millisecond
        self.works: Counter[int] = Counter()
        self._loop = asyncio.get_running_loop()
        self._set()

    def _set(self) -> None:
        self._due = self._loop.time() + PERIOD_SECONDS
        self._used = time.thread_time()
        self._loop.call_at(self._due, self._on_timer)

    def _on_timer(self) -> None:
        self.add(self._loop.time() - self._due, time.thread_time() - self._used)
        self._set()

    def add(self, lag_seconds: float, used_seconds: float) -> None:
        """Count one sample; `used_seconds`: processor time of the thread since the timer was set."""
        self.lags[round(lag_seconds * 1e5)] += 1
        self.works[round(min(lag_seconds, used_seconds) * 1e5)] += 1

    def summary(self) -> dict[str, float]:
        """Milliseconds."""
        found: dict[str, float] = {"samples": self.lags.total()}
        for name, counts in (("lag", self.lags), ("work", self.works)):
            for label, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0)):
                found[f"{name}_{label}_milliseconds"] = percentile(counts, share) / 1e2
        return found


def percentile(counts: Counter[int], share: float) -> int:
    """The value at `share` of the ranked samples, 1.0: the largest."""
    rank, seen = min(counts.total() - 1, int(share * counts.total())), 0
    for value, count in sorted(counts.items()):
        seen += count
        if seen > rank:
            return value
    raise ValueError("no samples")


async def serve(folder: str) -> None:
    """Until SIGINT."""
    config = RuntimeConfig(
        model=folder, served_model_name="bench", device=Device.CPU, host="127.0.0.1", port=0, max_num_seqs=64
    )
    listener, ledger = bind(config.host, config.port), BootLedger(process_age_seconds=0.0)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    meters: list[LagMeter] = []

    def on_phase(boot: BootSnapshot) -> None:
        if boot.phase is Phase.READY and not meters:
            meters.append(LagMeter())
            print(address, flush=True)

    ledger.subscribe(freeze_gc)  # as `millstream serve` does
    ledger.subscribe(on_phase)
    launcher = EngineProcessLauncher(config, "benchmarks.scripted_engine")
    await ModelServer(config, listener, ledger, launcher).run()
    print(json.dumps(meters[0].summary()), flush=True)


if __name__ == "__main__":
    try:
        os.nice(NICENESS)
    except PermissionError:
        print("not permitted to raise the priority", file=sys.stderr)
    asyncio.run(serve(str(Path(sys.argv[1]).resolve())))
