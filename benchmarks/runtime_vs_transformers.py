"""Our engine against `transformers.generate` on the same prompts, dtype and cores, interleaved in one process.

`cases` has the workloads and `contenders` the two sides. The repetitions alternate, so that both meet the same state of
the machine; a ratio is time over time. `vs_peers` is the longer comparison.

Our engine chooses its threads by the size of a step (`engine/threads.py`). `transformers` does not, so it runs both
with all threads and with one, and the better of the two, by the medians of a case, is what we are compared with.

`--processor-time` counts the processor time of one thread on both sides: for a machine that is shared with other work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import contenders, machine
from benchmarks.cases import Case, make_cases
from benchmarks.contenders import Runtime, TransformersGenerate
from benchmarks.random_model import write_random_model

RESULT = Path(__file__).parent / "results" / "runtime_vs_transformers.json"
DEMO_MODEL = Path(__file__).parent.parent / "models" / "demo-chat"


def compare(folder: Path, threads: int, repeats: int) -> dict[str, Any]:
    """Run every case `repeats` times on both sides, alternating."""
    runtime, peer = Runtime(folder), TransformersGenerate(folder)
    results = {}
    vocab_size = runtime.engine.model_config.vocab_size
    for rounds in zip(*(make_cases(vocab_size, round_) for round_ in range(repeats + 1)), strict=True):
        ours: list[float] = []
        theirs: dict[int, list[float]] = {count: [] for count in sorted({1, threads})}
        for round_, case in enumerate(rounds):
            seconds = {}
            for count in theirs:
                torch.set_num_threads(count)
                seconds[count], their_answers = peer.run(case)
            torch.set_num_threads(threads)
            our_seconds, our_answers = runtime.run(case)
            if round_ > 0:  # the first round warms both
                ours.append(our_seconds)
                for count, one in seconds.items():
                    theirs[count].append(one)
        best = min(theirs, key=lambda count: statistics.median(theirs[count]))
        results[case.name] = summarise(case, ours, theirs[best], our_answers, their_answers)
        results[case.name]["transformers_threads"] = best
        print(describe_case(case.name, results[case.name]), flush=True)
    results["threads"] = {"millstream": runtime.engine.threads.describe(), "all": threads}
    runtime.close()
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
    parser.add_argument("--processor-time", action="store_true", help="count processor time, on one thread")
    args = parser.parse_args(argv)
    if args.processor_time:
        os.environ["OMP_NUM_THREADS"], args.threads = "1", 1  # and so the engine leaves it at that
        contenders.clock = time.process_time
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or (DEMO_MODEL if (DEMO_MODEL / "config.json").exists() else None)
        name = folder.name if folder else "random weights of the demo model's shape"
        torch.set_num_threads(args.threads)
        results = compare(folder or write_random_model(Path(scratch)), args.threads, args.repeats)
        clock = "processor time of one thread" if args.processor_time else "wall"
        chosen = results.pop("threads")
        report = {"model": name, "dtype": "float32", "clock": clock, "threads": chosen}
        report |= {"machine": machine.describe(), "cases": results}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"saved {args.output}")


if __name__ == "__main__":
    main()
