"""`python -m tests.mutations [WORD…]`: put each trap back, one after another. Exit status 1: a test noticed nothing."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutations.kernel_traps import TRAPS
from tests.mutations.mutation import REPOSITORY, Mutation

TEST_FAILED = 1  # pytest's exit status; larger ones say that it could not run
TIMEOUT_SECONDS = 600


def main() -> int:
    """Run the mutations whose trap or file has one of the words; all of them without words."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only mutations whose trap or file has one of them")
    words = parser.parse_args().words
    chosen = [one for one in TRAPS if not words or any(word in one.trap or word in one.file for word in words)]
    if not chosen:
        print(f"mutations: none has {' or '.join(words)}", file=sys.stderr)
        return 2
    survivors = [one for number, one in enumerate(chosen, 1) if not _is_noticed(one, f"{number}/{len(chosen)}")]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} traps are noticed by the tests that name them")
    return 1 if survivors else 0


def _is_noticed(mutation: Mutation, number: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        root = mutation.file.split("/", 1)[0]
        shutil.copytree(REPOSITORY / root, Path(folder) / root, ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / mutation.file).write_text(mutation.mutated())
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutation.tests],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(Path(folder) / root)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    is_noticed = done.returncode == TEST_FAILED or done.returncode < 0  # a signal: the kernel wrote where it may not
    word = "noticed" if is_noticed else f"NOT NOTICED (pytest's exit status is {done.returncode})"
    print(f"{number:>7}  {word}  {mutation.file}: {mutation.trap}", flush=True)
    if not is_noticed:
        print(done.stdout[-1500:], done.stderr[-500:], sep="\n", file=sys.stderr)
    return is_noticed


if __name__ == "__main__":
    sys.exit(main())
