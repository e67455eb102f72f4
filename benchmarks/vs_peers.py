"""Ours against `transformers.generate`, transformers' continuous batching and llama.cpp, in one run.

    python -m benchmarks.vs_peers                       # both models, 5 rounds
    python -m benchmarks.vs_peers --models larger --rounds 2 --most-new-tokens 64

Same model, same cores, same threads, greedy, end-of-sequence ignored; `cases` has the workloads. Within a round the
sides take turns, and each round starts with another side, so that all meet the same state of the machine.
transformers runs in every float type, since which one is quickest depends on the CPU: the first round warms everybody
up and drops those types that are far behind the best of their kind (the result says which, and by how much).
llama.cpp runs where it is installed (`make peers`), with float32 weights and cache.

The baseline of `ratio_to_best_transformers` is the best of all of transformers' ways on that case, by medians.
For the larger model the share of the machine's memory stream that decoding at batch 1 reaches is printed too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.cases import MAX_NEW_TOKENS, Case, make_cases
from benchmarks.contenders import Contender, Runtime, TransformersContinuous, TransformersGenerate
from benchmarks.llama_cpp_side import LlamaCpp, NotInstalledError, find_interpreter
from benchmarks.memory_stream import stream_bytes_per_second, weight_bytes_per_token
from benchmarks.random_model import write_random_model
from benchmarks.runtime_vs_transformers import DEMO_MODEL
from benchmarks.shapes import LARGER

RESULTS = Path(__file__).parent / "results"  # one file a model: each is kept as soon as it is there
DTYPES = ("float32", "bfloat16", "float16")
FAR_BEHIND = 1.5  # times the best of its kind in the first round: not worth the rounds to come
OURS, TRANSFORMERS, LLAMA_CPP = "millstream", "transformers", "llama.cpp"


@dataclass
class Field:
    """Who takes part, and why others do not."""

    contenders: list[Contender] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    threads: int = field(default_factory=torch.get_num_threads)

    def invite(self, name: str, make: Callable[[], Contender]) -> None:
        """Take part, or leave a reason: a peer that cannot run here does not end the run of the others."""
        try:
            self.contenders.append(make())
        except Exception as error:
            self.absent[name] = " ".join(str(error).split())[:300] or type(error).__name__
            print(f"  {name}: {self.absent[name]}")


@dataclass
class Timing:
    """One side's rounds of one case."""

    seconds: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


def invite_all(folder: Path, scratch: Path, threads: int, dtypes: Sequence[str], peers_python: Path | None) -> Field:
    """Every side that can run this model here."""
    sides = Field(threads=threads)
    sides.invite(OURS, partial(Runtime, folder))
    for dtype in dtypes:
        sides.invite(f"transformers generate {dtype}", partial(TransformersGenerate, folder, dtype))
        for attention in ("sdpa", "paged|eager"):
            name = f"transformers continuous {dtype} {attention.removeprefix('paged|')}"
            sides.invite(name, partial(TransformersContinuous, folder, dtype, attention))
    try:
        python = find_interpreter(peers_python)
        sides.invite(LLAMA_CPP, partial(LlamaCpp, folder, scratch, python, threads))
    except NotInstalledError as error:
        sides.absent[LLAMA_CPP] = str(error)
        print(f"  llama.cpp: {error}")
    return sides


def run_case(sides: Field, cases: Sequence[Case]) -> dict[str, Any]:
    """`cases` is one case round by round; the first warms up and chooses who goes on."""
    running, dropped = list(sides.contenders), {}
    first: dict[str, float] = {}
    for contender in list(running):
        try:
            torch.set_num_threads(sides.threads)
            first[contender.name] = contender.run(cases[0])[0]
        except Exception as error:
            running.remove(contender)
            dropped[contender.name] = f"failed: {' '.join(str(error).split())[:200]}"
    for name, behind in far_behind(first).items():
        running = [contender for contender in running if contender.name != name]
        dropped[name] = f"{behind:.1f} × slower than the best of its kind in the first round"
    timings = {contender.name: Timing() for contender in running}
    for round_, case in enumerate(cases[1:]):
        turn = round_ % len(running)
        for contender in running[turn:] + running[:turn]:
            torch.set_num_threads(sides.threads)  # the engine chooses its own for each step
            seconds, timings[contender.name].answers = contender.run(case)
            timings[contender.name].seconds.append(seconds)
    return summarise(cases[-1], timings, dropped)


def kind_of(name: str) -> str:
    """`transformers generate float16` → `transformers generate`: what competes in the first round."""
    return " ".join(word for word in name.split() if word not in (*DTYPES, "sdpa", "eager"))


def far_behind(first_seconds: dict[str, float]) -> dict[str, float]:
    """Who is more than FAR_BEHIND times slower than the best of its kind, and by how much."""
    best: dict[str, float] = {}
    for name, seconds in first_seconds.items():
        best[kind_of(name)] = min(seconds, best.get(kind_of(name), seconds))
    behind = {name: seconds / best[kind_of(name)] for name, seconds in first_seconds.items()}
    return {name: ratio for name, ratio in behind.items() if ratio > FAR_BEHIND}


def summarise(case: Case, timings: dict[str, Timing], dropped: dict[str, str]) -> dict[str, Any]:
    """Tokens a second of each side, and our ratios (above 1: we are faster)."""
    tokens = sum(case.new_tokens)
    median = {name: statistics.median(timing.seconds) for name, timing in timings.items()}
    ours = next(name for name in median if name.startswith(OURS))
    theirs = {name: seconds for name, seconds in median.items() if name.startswith(TRANSFORMERS)}
    best = min(theirs, key=lambda name: theirs[name], default=None)
    llama = next((name for name in median if name.startswith(LLAMA_CPP)), None)
    return {
        "requests": len(case.prompts),
        "new_tokens": tokens,
        "seconds": {name: [round(value, 4) for value in timing.seconds] for name, timing in timings.items()},
        "tokens_per_second": {name: round(tokens / seconds, 2) for name, seconds in median.items()},
        "equal_answers": {
            name: sum(a == b for a, b in zip(timing.answers, timings[ours].answers, strict=True))
            for name, timing in timings.items()
        },
        "best_transformers": best,
        "ratio_to_best_transformers": round(theirs[best] / median[ours], 3) if best is not None else None,
        "ratio_to_llama_cpp": round(median[llama] / median[ours], 3) if llama is not None else None,
        "dropped_after_first_round": dropped,
    }


def run_model(folder: Path, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All cases on one model."""
    torch.set_num_threads(args.threads)
    stream = stream_bytes_per_second()
    sides = invite_all(folder, scratch, args.threads, args.dtypes, args.peers_python)
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        for contender in sides.contenders:
            stack.callback(contender.close)
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        rounds = [make_cases(vocab_size, round_, args.most_new_tokens) for round_ in range(args.rounds + 1)]
        for case_rounds in zip(*rounds, strict=True):
            case = case_rounds[0]
            results[case.name] = run_case(sides, case_rounds)
            print(table(case.name, results[case.name]), flush=True)
    weights = weight_bytes_per_token(folder)
    share = {  # every side that reads float32 weights; a narrower type reads less
        name: round(rate * weights / stream, 3)
        for name, rate in results["batch-1"]["tokens_per_second"].items()
        if "float16" not in name
    }
    print(f"\n  memory stream {stream / 1e9:.1f} GB/s, {weights / 1e6:.0f} MB of weights a token; share reached:")
    for name, value in share.items():
        print(f"    {name:<42}{value:8.0%}")
    return {
        "absent": sides.absent,
        "cases": results,
        "memory_stream_bytes_per_second": round(stream),
        "weight_bytes_per_token": weights,
        "batch_1_share_of_memory_stream": share,
    }


def table(name: str, result: dict[str, Any]) -> str:
    """One case for a person."""
    ours = next(value for side, value in result["tokens_per_second"].items() if side.startswith(OURS))
    lines = [f"\n  {name}: {result['requests']} requests, {result['new_tokens']} new tokens"]
    lines.append(f"    {'':<42}{'tok/s':>10}{'ours / it':>11}   answers equal to ours")
    for side, rate in sorted(result["tokens_per_second"].items(), key=lambda pair: -pair[1]):
        equal = f"{result['equal_answers'][side]}/{result['requests']}"
        lines.append(f"    {side:<42}{rate:>10.1f}{ours / rate:>11.2f}   {equal}")
    lines += [f"    {side:<42}   dropped: {why}" for side, why in result["dropped_after_first_round"].items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Parse flags, run, save."""
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vs_peers", description=summary)
    parser.add_argument("--models", nargs="+", choices=["demo", "larger"], default=["demo", "larger"])
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds; one more warms up (default: 5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="that transformers may use")
    parser.add_argument("--most-new-tokens", type=int, default=MAX_NEW_TOKENS, help="of the longest answer")
    parser.add_argument("--peers-python", type=Path, help="an interpreter with llama-cpp-python and gguf")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args(argv)
    if args.rounds < 1 or not 1 <= args.most_new_tokens <= MAX_NEW_TOKENS:
        parser.error(f"--rounds must be at least 1, and --most-new-tokens 1 to {MAX_NEW_TOKENS}")
    args.output.mkdir(parents=True, exist_ok=True)
    for model in args.models:
        report = {"rounds": args.rounds, "transformers_dtypes": list(args.dtypes), "machine": machine.describe()}
        with tempfile.TemporaryDirectory() as scratch:
            folder, name = model_folder(model, Path(scratch))
            print(f"\n{name}", flush=True)
            report |= {"model": name, **run_model(folder, Path(scratch), args)}
        path = args.output / f"vs_peers_{model}.json"
        path.write_text(json.dumps(report, indent=2) + "\n")
        print(f"\nsaved {path}")


def model_folder(model: str, scratch: Path) -> tuple[Path, str]:
    """The demo model where it is trained, else its shape; or the larger shape. Random weights lie in `scratch`."""
    if model == "larger":
        return write_random_model(scratch / "larger", LARGER), "random weights, 135 M parameters (SmolLM2's shape)"
    if (DEMO_MODEL / "config.json").exists():
        return DEMO_MODEL, DEMO_MODEL.name
    return write_random_model(scratch / "demo"), "random weights of the demo model's shape"


if __name__ == "__main__":
    main()
