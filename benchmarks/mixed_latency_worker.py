"""One engine, started by `benchmarks.mixed_latency` with the packages of one checkout: a JSON line in, a JSON line out.

It uses only what every version of the engine has: its configuration, requests, `step`. Clients send their requests one
after another, with a short pause between; all send the first at once.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams

MEDIAN_PROMPT_LOG_TOKENS, SIGMA = 4.1, 1.0  # log-normal: the median is 60 tokens
LEAST_PROMPT_TOKENS, MOST_PROMPT_TOKENS = 8, 1024
LEAST_NEW_TOKENS, MOST_NEW_TOKENS = 16, 128
MEAN_PAUSE_SECONDS = 0.05


class Clock:
    """Seconds, and what to do until the next request comes."""

    def __init__(self, *, processor_time: bool) -> None:
        """`processor_time`: of this process; a pause is then skipped."""
        self._read: Callable[[], float] = time.process_time if processor_time else time.perf_counter
        self._skips = processor_time
        self._skipped = 0.0

    def now(self) -> float:
        return self._read() + self._skipped

    def wait_until(self, then: float) -> None:
        left = max(0.0, then - self.now())
        if self._skips:
            self._skipped += left
        else:
            time.sleep(left)


@dataclass
class Times:
    """What clients saw, in seconds."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    sent: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)

    def see(self, request_id: str, now: float) -> None:
        """A token of the request has come."""
        if request_id in self.last:
            self.itl.append(now - self.last[request_id])
        else:
            self.ttft.append(now - self.sent[request_id])
        self.last[request_id] = now


def make_request(name: str, rng: random.Random, vocab_size: int) -> Request:
    length = round(rng.lognormvariate(MEDIAN_PROMPT_LOG_TOKENS, SIGMA))
    length = min(MOST_PROMPT_TOKENS, max(LEAST_PROMPT_TOKENS, length))
    prompt = [rng.randrange(3, vocab_size) for _ in range(length)]
    new_tokens = rng.randint(LEAST_NEW_TOKENS, MOST_NEW_TOKENS)
    return Request(name, prompt, SamplingParams(new_tokens, temperature=0.0, ignore_eos=True))


def run(engine: Engine, clock: Clock, clients: int, per_client: int, seed: int) -> dict[str, Any]:
    """All requests of all clients; the same seed gives the same requests."""
    rng = random.Random(seed)
    names = [[f"{client}-{turn}" for turn in range(per_client)] for client in range(clients)]
    vocab_size = engine.model_config.vocab_size
    requests = {name: make_request(name, rng, vocab_size) for mine in names for name in mine}
    pauses = {name: rng.expovariate(1 / MEAN_PAUSE_SECONDS) for name in requests}
    times, began = Times(), clock.now()
    due = [(began, mine.pop(0)) for mine in names]
    while due or engine.has_work():
        while due and due[0][0] <= clock.now():
            at, name = heapq.heappop(due)
            times.sent[name] = at
            engine.add_request(requests[name])
        if not engine.has_work():
            clock.wait_until(due[0][0])
            continue
        outputs, now = engine.step(), clock.now()
        for output in outputs:
            times.see(output.request_id, now)
            mine = names[int(output.request_id.split("-")[0])]
            if output.finish_reason is not None and mine:
                heapq.heappush(due, (now + pauses[output.request_id], mine.pop(0)))
    seconds, tokens = clock.now() - began, len(times.ttft) + len(times.itl)
    return {"ttft": times.ttft, "itl": times.itl, "tokens_per_second": tokens / seconds}


def main() -> None:
    """Serve runs until the end of stdin."""
    settings = json.loads(sys.argv[1])
    processor_time = settings.pop("processor_time")
    if processor_time:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    clock = Clock(processor_time=processor_time)
    config = RuntimeConfig(
        model=str(Path(settings.pop("model"))),
        served_model_name="bench",
        device=Device.CPU,
        max_num_seqs=64,
        enable_prefix_caching=False,
        **settings,
    )
    engine = Engine(config, lambda phase, message: None)
    engine.step_clock = clock.now
    engine.warm_up()
    replies, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(engine, clock, **json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
