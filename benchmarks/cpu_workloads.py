"""Workloads of `cpu_mechanisms`: requests that one engine computes while wall and processor time are counted.

    decode-1        one answer behind 64 tokens
    decode-1-long   one answer behind 1,500 tokens
    decode-16       16 answers behind 100 tokens each
    decode-64-mixed 64 answers behind 16 to 448 tokens
    prefill-512     prompts of 512 tokens, one after another
    prefill-any     prompts of random lengths, one after another
    mixed           8 answers run, and a prompt of 512 tokens enters every few steps
    burst           one answer runs, and 15 prompts of 20 to 400 tokens come at once
    drain           16 answers of which one ends at each step

Token ids are random. Prompts of decodes are computed before the clock starts.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams

MAX_MODEL_LEN, MAX_NUM_SEQS = 2048, 16
_numbers = count()


@dataclass(frozen=True)
class Sample:
    """One run of a workload. `gap_seconds`: the 95th percentile of the steps that gave running answers a token, of a
    burst the longest."""

    tokens: int
    seconds: float
    processor_seconds: float
    gap_seconds: float | None = None


@dataclass(frozen=True)
class Size:
    """How much of each workload is computed for one sample, a slow model less, and the threads of small steps."""

    decode_tokens: int
    batch_tokens: int
    prompts: int
    decode_threads: int = 1


def prompt_of(engine: Engine, rng: random.Random, num_tokens: int) -> list[int]:
    """Random token ids."""
    return [rng.randrange(3, engine.model_config.vocab_size) for _ in range(num_tokens)]


def add(engine: Engine, rng: random.Random, prompt_tokens: int, new_tokens: int) -> str:
    """Queue a request; its id."""
    name = f"request-{next(_numbers)}"
    sampling = SamplingParams(new_tokens, temperature=0.0, ignore_eos=True)
    engine.add_request(Request(name, prompt_of(engine, rng, prompt_tokens), sampling))
    return name


def finish(engine: Engine) -> None:
    """Step until nothing is left."""
    while engine.has_work():
        engine.step()


def timed(run: Callable[[], int]) -> Sample:
    """`run` returns how many tokens it computed."""
    processor, wall = time.process_time(), time.perf_counter()
    tokens = run()
    return Sample(tokens, time.perf_counter() - wall, time.process_time() - processor)


def decode(engine: Engine, rng: random.Random, prompt_tokens: list[int], steps: int) -> Sample:
    """Decodes alone: prompts are in before the clock starts. All of them fit into one step."""
    names = {add(engine, rng, length, MAX_MODEL_LEN - length - 1) for length in prompt_tokens}
    started: set[str] = set()
    while started < names:
        started |= {output.request_id for output in engine.step()}

    def run() -> int:
        return sum(len(engine.step()) for _ in range(steps))

    sample = timed(run)
    for name in names:
        engine.abort(name)
    return sample


def prefill(engine: Engine, rng: random.Random, lengths: list[int]) -> Sample:
    """Prompts one after another, each answered with one token."""

    def run() -> int:
        for length in lengths:
            add(engine, rng, length, 1)
            finish(engine)
        return sum(lengths)

    return timed(run)


def mixed(engine: Engine, rng: random.Random, num_prompts: int) -> Sample:
    """Tokens are those of the prompts and of the answers until the last prompt is in."""
    answers = {add(engine, rng, 64, 1500) for _ in range(8)}
    started: set[str] = set()
    while started < answers:
        started |= {output.request_id for output in engine.step()}
    gaps: list[float] = []

    def run() -> int:
        prompts = [add(engine, rng, 512, 1)]
        done, tokens = 0, 0
        while done < num_prompts:
            began = time.perf_counter()
            outputs = engine.step()
            gaps.append(time.perf_counter() - began)
            done += sum(output.request_id in prompts for output in outputs)
            tokens += sum(output.request_id in answers for output in outputs)
            if len(prompts) < num_prompts and len(gaps) % 8 == 0:
                prompts.append(add(engine, rng, 512, 1))
            if len(prompts) == done < num_prompts:
                prompts.append(add(engine, rng, 512, 1))
        return tokens + 512 * num_prompts

    sample = timed(run)
    for name in answers:
        engine.abort(name)
    slow = statistics.quantiles([0.0, *gaps], n=20)[-1] if len(gaps) > 1 else gaps[0]
    return Sample(sample.tokens, sample.seconds, sample.processor_seconds, min(slow, max(gaps)))


def burst(engine: Engine, rng: random.Random) -> Sample:
    """Tokens are those of the prompts and of the answers until the last prompt is in."""
    lengths = [rng.randint(20, 400) for _ in range(MAX_NUM_SEQS - 1)]
    answers = {add(engine, rng, 64, MAX_MODEL_LEN - 65)}
    while not engine.step():
        pass
    gaps: list[float] = []

    def run() -> int:
        prompts = {add(engine, rng, length, MAX_MODEL_LEN - length - 1) for length in lengths}
        answers.update(prompts)
        started: set[str] = set()
        tokens = 0
        while started < prompts:
            began = time.perf_counter()
            outputs = engine.step()
            gaps.append(time.perf_counter() - began)
            tokens += len(outputs)
            started |= {output.request_id for output in outputs} & prompts
        return tokens + sum(lengths)

    sample = timed(run)
    for name in answers:
        engine.abort(name)
    return Sample(sample.tokens, sample.seconds, sample.processor_seconds, max(gaps))


def drain(engine: Engine, rng: random.Random) -> Sample:
    """Decodes of 16 requests, 15, ..., 1."""
    for number in range(MAX_NUM_SEQS):
        add(engine, rng, 2, 2 + number)

    def run() -> int:
        tokens = 0
        while engine.has_work():
            tokens += len(engine.step())
        return tokens

    return timed(run)


def run_workload(name: str, engine: Engine, rng: random.Random, size: Size) -> Sample:
    """One sample; the engine is idle before and after."""
    match name:
        case "decode-1":
            sample = decode(engine, rng, [64], size.decode_tokens)
        case "decode-1-long":
            sample = decode(engine, rng, [1500], size.decode_tokens)
        case "decode-16":
            sample = decode(engine, rng, [100] * 16, size.batch_tokens)
        case "decode-64-mixed":
            sample = decode(engine, rng, [rng.randint(16, 448) for _ in range(64)], size.batch_tokens)
        case "prefill-512":
            sample = prefill(engine, rng, [512] * size.prompts)
        case "prefill-any":
            sample = prefill(engine, rng, [rng.randint(65, 512) for _ in range(2 * size.prompts)])
        case "mixed":
            sample = mixed(engine, rng, 1 + size.prompts)
        case "burst":
            sample = burst(engine, rng)
        case "drain":
            sample = drain(engine, rng)
        case _:
            raise ValueError(f"unknown workload {name!r}")
    finish(engine)
    return sample
