"""Which cases of the tests that mutations name are in the quick tier and in today's sample: pytest says it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from tests.mutations.mutation import REPOSITORY

COLLECTED, NOTHING_LEFT = 0, 5  # exit statuses of pytest


@dataclass(frozen=True, slots=True)
class Tiers:
    """Node IDs, with parameters. `day`: the date's ordinal number, which picks the sample."""

    day: int
    quick: frozenset[str]
    sample: frozenset[str]


def tiers_of(tests: Iterable[str], day: int) -> Tiers:
    """`tests`: node IDs without parameters."""
    names = sorted(set(tests))
    return Tiers(
        day, collected(names, "--tier", "quick"), collected(names, "--tier", "sample", "--matrix-day", str(day))
    )


def collected(tests: Iterable[str], *options: str) -> frozenset[str]:
    """The cases of `tests` that pytest would run.

    Raises:
        RuntimeError: pytest could not collect them.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options, *tests]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode not in (COLLECTED, NOTHING_LEFT):
        raise RuntimeError(f"pytest could not collect tests: {(done.stdout + done.stderr)[-1500:]}")
    return frozenset(line for line in done.stdout.splitlines() if "::" in line)
