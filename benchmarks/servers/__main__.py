"""Millstream, vLLM, OpenVINO GenAI, llama.cpp and `transformers serve`, server to server through one client.

    python -m benchmarks.servers                                  # all models, servers and cases, 3 rounds
    python -m benchmarks.servers --models demo --servers millstream vllm --cases 16-mixed 64-mixed --minutes 10
    python -m benchmarks.servers --tables                         # the tables of docs/benchmarking.md, from the results

Every server has the same model, the same threads and a KV cache of equal bytes. By default each chooses its dtype, as
users get it, and random weights are bfloat16, as published ones are; `--dtype float32` is the second table. Before a
case is timed, each server answers one short request per client. Within a round the servers take turns; each round
starts with another one. Servers that use a core while idle are stopped (SIGSTOP) during the turns of the others. A
server that cannot run, or fails, leaves a reason. Case 32-mixed has ours alone: its goal is that more clients get no
fewer tokens. Results are written after every case.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.servers import tables
from benchmarks.servers.comparison import Comparison
from benchmarks.servers.load import Case
from benchmarks.servers.models import AUTO, FLOAT32, MODELS, ROOT, prepare
from benchmarks.servers.peers import OURS, SERVERS

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarking.md"
MOST_NEW_TOKENS = 192
CASES = [  # those with a goal come first: time may run out
    *(Case(1, "equal"), Case(16, "equal"), Case(16, "mixed"), Case(32, "mixed", ours_alone=True)),
    *(Case(64, "mixed"), Case(128, "mixed")),
    *(Case(4, "equal"), Case(4, "mixed"), Case(64, "equal"), Case(128, "equal")),
]


def main(argv: list[str] | None = None) -> None:
    """Parse flags, run, save."""
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.servers", description=summary)
    names = [case.name for case in CASES]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--dtype", choices=[AUTO, FLOAT32], default=AUTO, help="of every server")
    parser.add_argument("--servers", nargs="+", choices=list(SERVERS), default=list(SERVERS))
    parser.add_argument("--cases", nargs="+", choices=names, default=names, help="clients and lengths")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each case (default: 3)")
    parser.add_argument("--minutes", type=float, default=120.0, help="per model; no case begins later (default: 120)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every server")
    parser.add_argument("--most-new-tokens", type=int, default=MOST_NEW_TOKENS, help="of the longest answer")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--tables", action="store_true", help="only rewrite the tables of docs/benchmarking.md")
    args = parser.parse_args(argv)
    if args.tables:
        tables.write(PAGE, args.output)
        return
    if min(args.rounds, args.threads, args.most_new_tokens) < 1:
        parser.error("--rounds, --threads and --most-new-tokens must be at least 1")
    if OURS not in args.servers:
        parser.error(f"--servers must hold {OURS}: all ratios are to it")
    signal.signal(signal.SIGTERM, _leave)  # so that `finally` ends the servers
    args.output.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if case.name in args.cases]
    for name in args.models:
        with tempfile.TemporaryDirectory() as scratch:
            model = prepare(name, args.dtype, Path(scratch))
            lengths = {one: length.with_answers_of(args.most_new_tokens) for one, length in model.lengths.items()}
            model = replace(model, lengths=lengths)
            print(f"\n{model.description}", flush=True)
            path = args.output / f"servers_{name}_{args.dtype}.json"
            Comparison(model, Path(scratch), path, args.threads, args.rounds).run(args.servers, cases, args.minutes)
            print(f"saved {path}")


def _leave(_number: int, _frame: Any) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
