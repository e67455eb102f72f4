"""What an engine is asked, and how fast it answers."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams

STEADY_STEPS = 20  # of decodes, for the share of time in which the device has nothing to do


@dataclass(frozen=True, slots=True)
class Load:
    """`num_requests` at once, prompts and answers of `least` to `most` tokens, drawn with a seed."""

    num_requests: int
    least: int
    most: int

    def requests(self, vocab_size: int, seed: int = 0) -> list[Request]:
        rng = random.Random(seed)
        sizes = self._lengths(rng)
        return [
            Request(
                f"r{index}",
                [rng.randrange(vocab_size) for _ in range(prompt)],
                SamplingParams(answer, temperature=0.0, ignore_eos=True),
                cache_salt=str(seed),
            )
            for index, (prompt, answer) in enumerate(sizes)
        ]

    def lengths(self, seed: int = 0) -> list[tuple[int, int]]:
        """Prompt and answer of each request of `requests`, in tokens."""
        return self._lengths(random.Random(seed))

    def _lengths(self, rng: random.Random) -> list[tuple[int, int]]:
        return [
            (rng.randint(self.least, self.most), rng.randint(self.least, self.most)) for _ in range(self.num_requests)
        ]


NANO = Load(256, 100, 1024)
ALONE = Load(1, 512, 512)


def tokens_per_second(engine: Engine, load: Load) -> float:
    """Answer tokens a second, from the first step to the last token.

    A round of another seed warms up before, so that graphs are recorded; eager steps need a short one only.
    """
    warm_up = load if engine.graphs is not None else replace(load, most=load.least)
    for seed, round_ in ((1, warm_up), (0, load)):
        requests = round_.requests(engine.model_config.vocab_size, seed)
        for request in requests:
            engine.add_request(request)
        began = time.perf_counter()
        while engine.has_work():
            engine.step()
        seconds = time.perf_counter() - began
    return sum(request.sampling.max_tokens for request in requests) / seconds


def steady_idle_share(engine: Engine, num_requests: int) -> float | None:
    """The share of steady decoding in which no kernel runs; None where there is no GPU to watch."""
    if not torch.cuda.is_available():
        return None
    sampling = SamplingParams(4 * STEADY_STEPS, temperature=0.0, ignore_eos=True)
    for index in range(num_requests):  # the salt: equal prompts must not share blocks
        name = f"steady-{index}"
        engine.add_request(Request(name, [index % 100 + 1] * 64, sampling, cache_salt=name))
    for _ in range(STEADY_STEPS):
        engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEADY_STEPS):
            engine.step()
        torch.cuda.synchronize()
    kernels = [one for one in profile.events() if one.device_type.name == "CUDA"]
    for index in range(num_requests):
        engine.abort(f"steady-{index}")
    while engine.has_work():
        engine.step()
    return idle_share((one.time_range.start, one.time_range.end) for one in kernels)


def idle_share(intervals: Iterable[tuple[float, float]]) -> float:
    """The share of the time from the first begin to the last end that no interval covers; they may overlap."""
    ordered = sorted(intervals)
    if not ordered:
        return 1.0
    busy, reached = 0.0, ordered[0][0]
    for start, end in ordered:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    whole = reached - ordered[0][0]
    return 1.0 - busy / whole if whole else 0.0
