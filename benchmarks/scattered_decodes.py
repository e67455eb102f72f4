"""What decodes cost whose KV blocks lie scattered in the pool, against sequences that lie in their regions.

    contiguous  a new pool: every sequence lies in its region, and attention reads it in place
    shared      all prompts begin with the same cached blocks, half of their length: their own blocks lie elsewhere
    evicted     a pool full of cached blocks of many lengths: every new block is one that was evicted

The same prompts and steps in each, in turns. A step is one token of each sequence. Processor time on one thread, since
the machine may be shared; greedy answers must be equal.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.random_model import write_random_model
from benchmarks.shapes import DEMO, LARGER
from millstream_runtime.config import Device, DType, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams

RESULT = Path(__file__).parent / "results" / "scattered_decodes.json"
KINDS = ("contiguous", "shared", "evicted")
LOADS = [(1, 1024), (16, 256), (16, 512)]  # sequences, tokens of each prompt
STEPS, ROUNDS = 24, 3
BLOCK_TOKENS = 16
ROOM = 1.25  # of the pool, over what the sequences need
FLOAT32_BYTES = 4
LEAST_POOL_BYTES = 1 << 20  # that the engine accepts


class Pool:
    """An engine whose pool is in one of the states."""

    def __init__(self, folder: Path, kind: str, num_seqs: int, prompt_tokens: int) -> None:
        config = json.loads((folder / "config.json").read_text())
        token_bytes = (
            config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2 * FLOAT32_BYTES
        )
        tokens = int(num_seqs * (prompt_tokens + STEPS + 2 * BLOCK_TOKENS) * ROOM)
        self.kind, self._requests = kind, 0
        self.num_scattered = 0  # sequences of the last steps whose blocks do not follow one another
        self._engine = Engine(
            RuntimeConfig(
                model=str(folder),
                served_model_name="bench",
                device=Device.CPU,
                dtype=DType.FLOAT32,
                max_model_len=prompt_tokens + STEPS + BLOCK_TOKENS,
                max_num_seqs=num_seqs,
                block_size_tokens=BLOCK_TOKENS,
                kv_cache_memory_bytes=max(LEAST_POOL_BYTES, tokens * token_bytes),
                enable_prefix_caching=kind != "contiguous",
            ),
            lambda phase, message: None,
        )
        self._vocab_size = int(config["vocab_size"])
        if kind == "evicted":
            self._churn(num_seqs, prompt_tokens)

    def decode(self, prompts: Sequence[Sequence[int]]) -> tuple[float, list[list[int]]]:
        """Milliseconds of a step (the median), and the answers."""
        if self.kind == "shared":
            self._run([list(prompts[0])], 1)  # its blocks are cached; the others share the half that is equal
        self.num_scattered = 0
        return self._run(prompts, STEPS)

    def _churn(self, at_once: int, most_tokens: int) -> None:
        """Fill the pool twice, by prompts of many lengths that come and go."""
        rng, tokens = random.Random(3), 2 * self._engine._blocks.num_blocks * BLOCK_TOKENS
        while tokens > 0:
            lengths = [rng.randint(BLOCK_TOKENS, most_tokens) for _ in range(at_once)]
            self._run([[rng.randrange(3, self._vocab_size) for _ in range(length)] for length in lengths], 2, rng)
            tokens -= sum(lengths)

    def _run(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, rng: random.Random | None = None
    ) -> tuple[float, list[list[int]]]:
        """`rng`: answers of different lengths."""
        answers: dict[str, list[int]] = {}
        for prompt in prompts:
            self._requests += 1
            count = new_tokens if rng is None else rng.randint(1, 4 * new_tokens)
            answers[str(self._requests)] = []
            sampling = SamplingParams(count, temperature=0.0, ignore_eos=True)
            self._engine.add_request(Request(str(self._requests), list(prompt), sampling))
        times: list[float] = []
        while self._engine.has_work():
            all_decode = all(answers.values())
            if all_decode:
                running = self._engine._scheduler.running
                self.num_scattered = max(self.num_scattered, sum(not one.blocks_are_contiguous for one in running))
            start = time.process_time()
            for output in self._engine.step():
                if output.token_id is not None:
                    answers[output.request_id].append(output.token_id)
            if all_decode:
                times.append((time.process_time() - start) * 1e3)
        return statistics.median(times) if times else 0.0, list(answers.values())


def prompts_of(vocab_size: int, num_seqs: int, prompt_tokens: int, round_: int) -> list[list[int]]:
    """Prompts whose first half is the same within a round."""
    rng = random.Random(f"{round_}/prompts")
    shared = [rng.randrange(3, vocab_size) for _ in range(prompt_tokens // 2)]
    return [
        shared + [rng.randrange(3, vocab_size) for _ in range(prompt_tokens - len(shared))] for _ in range(num_seqs)
    ]


def measure(folder: Path, num_seqs: int, prompt_tokens: int, rounds: int) -> dict[str, Any]:
    """Medians over rounds, in which the states take turns."""
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    pools = [Pool(folder, kind, num_seqs, prompt_tokens) for kind in KINDS]
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    equal = dict.fromkeys(KINDS, True)
    for round_ in range(rounds + 1):
        prompts = prompts_of(vocab_size, num_seqs, prompt_tokens, round_)
        wanted: list[list[int]] = []
        for pool in pools:
            milliseconds, answers = pool.decode(prompts)
            wanted = wanted or answers
            equal[pool.kind] &= answers == wanted
            if round_:  # the first warms up
                found[pool.kind].append(milliseconds)
    medians = {kind: statistics.median(values) for kind, values in found.items()}
    return {
        "sequences": num_seqs,
        "prompt_tokens": prompt_tokens,
        "step_milliseconds": {kind: round(value, 3) for kind, value in medians.items()},
        "ratio_to_contiguous": {kind: round(medians[kind] / medians[KINDS[0]], 2) for kind in KINDS[1:]},
        "scattered_sequences": {pool.kind: pool.num_scattered for pool in pools},
        "answers_equal": equal,
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scattered_decodes", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=["demo", "larger"], default=["demo", "larger"])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for model in args.models:
            folder = write_random_model(Path(scratch) / model, DEMO if model == "demo" else LARGER)
            results[model] = []
            for num_seqs, prompt_tokens in LOADS:
                one = measure(folder, num_seqs, prompt_tokens, args.rounds)
                results[model].append(one)
                shown = ", ".join(f"{kind} {value:.2f} ms" for kind, value in one["step_milliseconds"].items())
                ratios = ", ".join(f"{kind} {value:.2f} ×" for kind, value in one["ratio_to_contiguous"].items())
                print(f"{model:7} {num_seqs:3} × {prompt_tokens:5} tokens: {shown}; {ratios}", flush=True)
                report = {"machine": machine.describe(), "steps": STEPS, "rounds": args.rounds, "models": results}
                args.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"saved {args.output}")


if __name__ == "__main__":
    main()
