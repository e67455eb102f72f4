"""Attention of prompts on a CPU: the compiled kernel against torch, as the engine would call either.

    python -m benchmarks.prompt_attention [--save]

One layer of the demo model's shape (8 heads of 64 over 4 of keys), float32, blocks of 16 that follow one another, so
that torch gathers nothing. The two take turns. A rate counts the operations that a causal mask leaves: 4 * D per query,
head and token that it sees. A ratio is torch's seconds over the kernel's, per pair of neighbouring runs: the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from millstream_kernels.cpu.decode import load
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.compiled_prompts import CompiledPrompts
from millstream_runtime.engine.attention.prefill import KeptMasks, PromptCall
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.models.layers.attention import AttentionSpec
from millstream_runtime.models.registry import load_model_config

RESULT = Path(__file__).parent / "results" / "prompt_attention.json"
DEMO_MODEL = Path(__file__).parent.parent / "models" / "demo-chat"
CHUNKS = ((64, 0), (128, 0), (256, 0), (512, 0), (4096, 0), (16, 4000))  # new tokens, and tokens before them
THREADS = (1, 2)
BLOCK_SIZE_TOKENS, LEAST_SECONDS = 16, 0.01
Call = Callable[[], Tensor]


def measure(num_tokens: int, tokens_before: int, num_threads: int, pairs: int) -> dict[str, Any]:
    """Rates of both and their ratio, for one chunk."""
    torch.set_num_threads(num_threads)
    compiled, by_torch, operations = calls(num_tokens, tokens_before)
    torch.testing.assert_close(compiled(), by_torch(), rtol=1e-4, atol=1e-4)
    repeats = max(1, round(LEAST_SECONDS / seconds(by_torch, 1)))
    times = [(seconds(compiled, repeats), seconds(by_torch, repeats)) for _ in range(pairs)]
    ratios = sorted(other / own for own, other in times)
    own, other = (statistics.median(of) for of in zip(*times, strict=True))
    return {
        "tokens": num_tokens,
        "tokens_before": tokens_before,
        "threads": num_threads,
        "compiled_gflops": round(operations / own / 1e9, 1),
        "torch_gflops": round(operations / other / 1e9, 1),
        "ratio": {
            "median": round(statistics.median(ratios), 2),
            "low": round(ratios[0], 2),
            "high": round(ratios[-1], 2),
        },
    }


def calls(num_tokens: int, tokens_before: int) -> tuple[Call, Call, int]:
    """Both calls over one pool, and the useful operations of one."""
    config, length = load_model_config(DEMO_MODEL), tokens_before + num_tokens
    num_blocks = -(-length // BLOCK_SIZE_TOKENS)
    cache = KVCache(config, num_blocks, BLOCK_SIZE_TOKENS, torch.float32, torch.device("cpu"))
    cache.heads[0].normal_()
    heads, dim = config.num_kv_heads, config.head_dim
    query, spec = torch.randn(num_tokens, heads, config.num_heads // heads, dim), AttentionSpec(dim**-0.5)
    chunk = AttentionChunk(num_tokens, length, range(num_blocks), is_contiguous=True)
    compiled, by_torch = CompiledPrompts(load(), cache, [chunk], 0), PromptCall(cache, chunk, 0, KeptMasks())
    pool, seen = cache.layer(0), sum(range(tokens_before + 1, length + 1))
    operations = 4 * dim * config.num_heads * seen
    return lambda: compiled(pool, query, spec), lambda: by_torch(pool, query, spec), operations


def seconds(call: Call, repeats: int) -> float:
    """Of one call, the mean of several."""
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


def line(found: dict[str, Any]) -> str:
    """What is printed of one measurement."""
    rates, ratio = (found["compiled_gflops"], found["torch_gflops"]), found["ratio"]
    return (
        f"threads {found['threads']}, {found['tokens']:4} tokens behind {found['tokens_before']:4}: "
        f"{rates[0]:6.1f} GFLOP/s, torch {rates[1]:5.1f}, ratio {ratio['median']:.2f} "
        f"({ratio['low']:.2f} to {ratio['high']:.2f})"
    )


def main(argv: list[str] | None = None) -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prompt_attention")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    args = parser.parse_args(argv)
    results = []
    for num_threads in THREADS:
        for num_tokens, tokens_before in CHUNKS:
            found = measure(num_tokens, tokens_before, num_threads, args.pairs)
            results.append(found)
            print(line(found), flush=True)
    if args.save:
        report = {"machine": machine.describe(), "pairs": args.pairs, "results": results}
        RESULT.write_text(json.dumps(report, indent=2) + "\n")
        print(f"saved {RESULT}")


if __name__ == "__main__":
    main()
