"""`python -m tests.mutations [WORD…]`: put each mutation in, one after another, and run the tests that it names.

Prints a table: what killed each, and whether the quick tier and the day's sample have that case. A run over all
mutations writes results.json next to this file. Exit status 1: a mutation survived, or one against a promise of the
README is noticed by no case of the quick tier.
"""

from __future__ import annotations

import argparse
import datetime
import json
import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tests.mutations import results
from tests.mutations.catalogue import MUTATIONS
from tests.mutations.kills import Verdict, judge, without_false_kills
from tests.mutations.mutation import Mutation
from tests.mutations.prepared_process import PreparedProcess
from tests.mutations.promises import PROMISES
from tests.mutations.tiers import Tiers, tiers_of
from tests.mutations.working_copy import WorkingCopy


def main() -> int:
    """Run the mutations whose trap or file has one of the words; all of them without words."""
    options = _options()
    chosen = [mutation for mutation in MUTATIONS if _has_word(mutation, options.words)]
    if not chosen:
        print(f"mutations: none has {' or '.join(options.words)}", file=sys.stderr)
        return 2
    began = time.monotonic()
    try:
        tiers = tiers_of((test for mutation in chosen for test in mutation.tests), options.matrix_day)
    except RuntimeError as error:
        print(f"mutations: {error}", file=sys.stderr)
        return 2
    verdicts = _judge_all(chosen, tiers, max(1, options.processes))
    found = results.results_of(verdicts, tiers, time.monotonic() - began)
    print(f"\n{results.markdown(found)}")
    if len(chosen) == len(MUTATIONS):
        results.write(found)
    broken = broken_promises([verdict for verdict in verdicts if verdict.mutation in PROMISES], tiers)
    print(*broken, sep="\n", end="\n" if broken else "", file=sys.stderr)
    return 1 if broken or any(verdict.killed_by is None for verdict in verdicts) else 0


def _options() -> argparse.Namespace:
    today = datetime.datetime.now(datetime.UTC).date().toordinal()
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="only mutations whose trap or file has one of them")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="how many mutations to judge at once")
    parser.add_argument("--matrix-day", type=int, default=today, metavar="N", help="the day whose sample is looked at")
    return parser.parse_args()


def broken_promises(verdicts: Sequence[Verdict], tiers: Tiers) -> list[str]:
    """The promises of the README that `make test` would not see broken, in a sentence each."""
    return [
        f"mutations: {verdict.mutation.tests[0]} does not notice in the quick tier: {verdict.mutation.trap}"
        for verdict in verdicts
        if verdict.killed_by is not None and verdict.killed_by not in tiers.quick
    ]


def _has_word(mutation: Mutation, words: Sequence[str]) -> bool:
    return not words or any(word in mutation.trap or word in mutation.file for word in words)


def _judge_all(mutations: Sequence[Mutation], tiers: Tiers, num_processes: int) -> list[Verdict]:
    """The verdicts in the order of `mutations`; each is printed when it is known."""
    processes: queue.SimpleQueue[PreparedProcess] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        cases = Path(root) / "cases.json"
        cases.write_text(json.dumps({"quick": sorted(tiers.quick), "sample": sorted(tiers.sample)}))
        workers = stack.enter_context(ThreadPoolExecutor(num_processes))
        for number in range(num_processes):
            process = PreparedProcess(WorkingCopy(Path(root).resolve() / str(number)))
            stack.callback(process.close)
            processes.put(process)

        def judge_one(mutation: Mutation) -> Verdict:
            process = processes.get()
            try:
                verdict = judge(mutation, process, cases)
            finally:
                processes.put(process)
            _print(verdict, tiers)
            return verdict

        try:
            verdicts = list(workers.map(judge_one, mutations))
        except BaseException:  # Ctrl-C: what has not begun does not begin
            workers.shutdown(wait=False, cancel_futures=True)
            raise
        checked = without_false_kills(verdicts, processes.get(), cases)
    for before, after in zip(verdicts, checked, strict=True):
        if after != before:
            _print(after, tiers)
    return checked


def _print(verdict: Verdict, tiers: Tiers) -> None:
    if verdict.killed_by is None:
        word = "NOT KILLED"
    elif verdict.killed_by in tiers.quick:
        word = "quick"
    else:
        word = "sample" if verdict.killed_by in tiers.sample else "another day"
    print(f"{word:>11}  {verdict.mutation.file}: {verdict.mutation.trap}", flush=True)
    if verdict.killed_by is None:
        print(verdict.problem, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
