"""What the prefix cache saves: time to first token behind a shared prefix of 2,000 tokens, computed and found.

Pairs of requests alternate: a prefix nobody has sent, then the same prefix with another ending. The target is a
ratio of 5 at least. The same prompts also run without a cache: their answers must be equal.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.random_model import write_random_model
from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams

RESULT = Path(__file__).parent / "results" / "prefix_cache.json"
PREFIX_TOKENS = 2000
ENDING_TOKENS = 20
ANSWER = SamplingParams(8, temperature=0.0, ignore_eos=True)


def answer(engine: Engine, prompt: list[int]) -> tuple[float, list[int], int]:
    """Seconds to the first token, the tokens, and how many of the prompt's were in the cache."""
    engine.add_request(Request("one", prompt, ANSWER))
    tokens: list[int] = []
    first_seconds, cached_tokens = 0.0, 0
    start = time.perf_counter()
    while engine.has_work():
        for output in engine.step():
            if output.prefill is not None:
                first_seconds, cached_tokens = time.perf_counter() - start, output.prefill.num_cached_tokens
            if output.token_id is not None:
                tokens.append(output.token_id)
    return first_seconds, tokens, cached_tokens


def measure(folder: Path, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` pairs, after one pair that warms up."""

    def engine_with(enable_prefix_caching: bool) -> Engine:
        config = RuntimeConfig(
            model=str(folder),
            served_model_name="bench",
            device=Device.CPU,
            max_model_len=4096,
            max_num_seqs=8,
            enable_prefix_caching=enable_prefix_caching,
        )
        return Engine(config, lambda phase, message: None)

    caching, plain = engine_with(True), engine_with(False)
    rng = random.Random(5)
    vocab_size = caching.model_config.vocab_size
    computed: list[float] = []
    found: list[float] = []
    equal = cached = 0
    for repeat in range(repeats + 1):
        prefix = [rng.randrange(3, vocab_size) for _ in range(PREFIX_TOKENS)]
        endings = [[rng.randrange(3, vocab_size) for _ in range(ENDING_TOKENS)] for _ in range(2)]
        cold, _, _ = answer(caching, prefix + endings[0])
        hit, tokens, cached = answer(caching, prefix + endings[1])
        equal += tokens == answer(plain, prefix + endings[1])[1]
        if repeat:
            computed.append(cold)
            found.append(hit)
    return {
        "prefix_tokens": PREFIX_TOKENS,
        "cached_tokens": cached,
        "computed_seconds": round(statistics.median(computed), 4),
        "found_seconds": round(statistics.median(found), 4),
        "ratio_of_medians": round(statistics.median(computed) / statistics.median(found), 1),
        "equal_answers": f"{equal}/{repeats + 1}",
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_cache", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder (default: random weights of the demo model's shape)")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(args.model or write_random_model(Path(scratch)), args.repeats)
    print(
        f"first token after {PREFIX_TOKENS} shared tokens: {result['computed_seconds']} s computed, "
        f"{result['found_seconds']} s found, ratio {result['ratio_of_medians']}, "
        f"equal answers {result['equal_answers']}"
    )
    RESULT.write_text(json.dumps({"machine": machine.describe(), **result}, indent=2) + "\n")
    print(f"saved {RESULT}")


if __name__ == "__main__":
    main()
