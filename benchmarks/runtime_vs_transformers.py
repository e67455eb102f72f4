"""Our engine against `transformers.generate` on the same prompts, dtype and threads, interleaved in one process.

    batch-1        one prompt, 128 new tokens
    equal          16 prompts, 128 new tokens each
    mixed          16 prompts, 32 to 512 new tokens, in shuffled order

transformers gets all prompts as one left-padded static batch, which runs until its longest answer is done; the
engine gets them as 16 requests. Greedy, end-of-sequence ignored, so both produce the same number of useful tokens.
The repetitions alternate, so that both meet the same state of the machine; a ratio is time over time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import machine
from benchmarks.random_model import write_random_model
from millstream_runtime.config import Device, DType, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams

RESULT = Path(__file__).parent / "results" / "runtime_vs_transformers.json"
DEMO_MODEL = Path(__file__).parent.parent / "models" / "demo-chat"
NUM_CONCURRENT = 16


@dataclass(frozen=True)
class Case:
    """Prompts (token ids) and how many tokens each is to be answered with."""

    name: str
    prompts: list[list[int]]
    new_tokens: list[int]


def make_cases(vocab_size: int) -> list[Case]:
    """The three cases, the same on every machine. Prompts have 16 to 64 tokens."""
    rng = random.Random(7)
    prompts = [[rng.randrange(3, vocab_size) for _ in range(rng.randint(16, 64))] for _ in range(NUM_CONCURRENT)]
    mixed = [32 + round(i * (512 - 32) / (NUM_CONCURRENT - 1)) for i in range(NUM_CONCURRENT)]
    rng.shuffle(mixed)
    return [
        Case("batch-1", prompts[:1], [128]),
        Case("equal", prompts, [128] * NUM_CONCURRENT),
        Case("mixed", prompts, mixed),
    ]


def run_engine(engine: Engine, case: Case) -> tuple[float, list[list[int]]]:
    """Seconds from the first request to the last token, and the answers."""
    answers: dict[str, list[int]] = {str(index): [] for index in range(len(case.prompts))}
    start = time.perf_counter()
    for index, (prompt, count) in enumerate(zip(case.prompts, case.new_tokens, strict=True)):
        engine.add_request(Request(str(index), prompt, SamplingParams(count, temperature=0.0, ignore_eos=True)))
    while engine.has_work():
        for output in engine.step():
            if output.token_id is not None:
                answers[output.request_id].append(output.token_id)
    return time.perf_counter() - start, list(answers.values())


def run_transformers(model: Any, case: Case) -> tuple[float, list[list[int]]]:
    """The same by one padded static batch."""
    longest = max(map(len, case.prompts))
    start = time.perf_counter()
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in case.prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in case.prompts])
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max(case.new_tokens),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    seconds = time.perf_counter() - start
    return seconds, [
        row[longest : longest + count].tolist() for row, count in zip(output, case.new_tokens, strict=True)
    ]


def compare(folder: Path, threads: int, repeats: int) -> dict[str, Any]:
    """Run every case `repeats` times on both sides, alternating."""
    config = RuntimeConfig(
        model=str(folder),
        served_model_name="bench",
        device=Device.CPU,
        dtype=DType.FLOAT32,
        max_num_seqs=NUM_CONCURRENT,
        enable_prefix_caching=False,  # the repetitions send the same prompts: a cache would answer from the one before
    )
    engine = Engine(config, lambda phase, message: print(f"  {phase}: {message}"))
    engine.warm_up()
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    peer.generation_config.eos_token_id = None
    torch.set_num_threads(threads)
    results = {}
    for case in make_cases(engine.model_config.vocab_size):
        ours: list[float] = []
        theirs: list[float] = []
        for repeat in range(repeats + 1):
            their_seconds, their_answers = run_transformers(peer, case)
            our_seconds, our_answers = run_engine(engine, case)
            if repeat > 0:  # the first pair warms both
                theirs.append(their_seconds)
                ours.append(our_seconds)
        results[case.name] = summarise(case, ours, theirs, our_answers, their_answers)
        print(describe_case(case.name, results[case.name]), flush=True)
    engine.check_integrity()
    return results


def summarise(
    case: Case, ours: list[float], theirs: list[float], our_answers: list[list[int]], their_answers: list[list[int]]
) -> dict[str, Any]:
    """Seconds of every repetition, useful tokens a second, and the ratios (above 1: we are faster)."""
    tokens = sum(case.new_tokens)
    return {
        "requests": len(case.prompts),
        "new_tokens": tokens,
        "runtime_seconds": [round(value, 4) for value in ours],
        "transformers_seconds": [round(value, 4) for value in theirs],
        "runtime_tokens_per_second": round(tokens / statistics.median(ours), 1),
        "transformers_tokens_per_second": round(tokens / statistics.median(theirs), 1),
        "ratio_of_medians": round(statistics.median(theirs) / statistics.median(ours), 3),
        "ratio_of_minima": round(min(theirs) / min(ours), 3),
        "worst_pair_ratio": round(min(t / o for t, o in zip(theirs, ours, strict=True)), 3),
        "equal_answers": sum(a == b for a, b in zip(our_answers, their_answers, strict=True)),
    }


def describe_case(name: str, result: dict[str, Any]) -> str:
    """One line for a person."""
    return (
        f"{name:8} runtime {result['runtime_tokens_per_second']:8.1f} tok/s   transformers "
        f"{result['transformers_tokens_per_second']:8.1f} tok/s   ratio {result['ratio_of_medians']:.2f} (median) "
        f"{result['ratio_of_minima']:.2f} (min)   equal answers {result['equal_answers']}/{result['requests']}"
    )


def main(argv: list[str] | None = None) -> None:
    """Parse flags, run, save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder (default: models/demo-chat, else random weights)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or (DEMO_MODEL if (DEMO_MODEL / "config.json").exists() else None)
        name = folder.name if folder else "random weights of the demo model's shape"
        torch.set_num_threads(args.threads)
        results = compare(folder or write_random_model(Path(scratch)), args.threads, args.repeats)
        report = {"model": name, "dtype": "float32", "machine": machine.describe(), "cases": results}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"saved {args.output}")
