"""Two lanes: tests that touch only their own namespace run in several processes, the others alone afterwards.

    pytest e2e --lane own --numprocesses 2
    pytest e2e --lane alone

`make e2e` calls both. Without `--lane` all run in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import pytest

from e2e.shared_things import SharedThing

MARKER = "shared"
# The first of these begin first, so that no process is left with a long test at the end. The others follow in the order
# in which pytest found them.
LONG_FIRST = (
    *("test_tuning.py", "test_quantization.py", "test_status.py", "test_speculation.py", "test_rollout.py"),
    "test_autoscaling.py",
)


class Lane(StrEnum):
    """What `--lane` takes."""

    OWN = "own"
    ALONE = "alone"


def shared_things(item: pytest.Item) -> frozenset[SharedThing]:
    """What a test is marked to touch.

    Raises:
        pytest.UsageError: a mark names nothing, or no SharedThing.
    """
    marks = list(item.iter_markers(MARKER))
    for mark in marks:
        if not mark.args or mark.kwargs or not all(isinstance(one, SharedThing) for one in mark.args):
            names = ", ".join(SharedThing.__members__)
            raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.shared takes members of SharedThing: {names}.")
    return frozenset(one for mark in marks for one in mark.args)


def in_lane(items: Sequence[pytest.Item], lane: Lane | None) -> list[pytest.Item]:
    """Return the tests of a lane in the order in which they should run; of both for None."""
    if lane is Lane.OWN:
        own = [item for item in items if not shared_things(item)]
        return sorted(own, key=lambda item: _rank(item.path.name))
    return [item for item in items if lane is None or shared_things(item)]


def _rank(file: str) -> int:
    return LONG_FIRST.index(file) if file in LONG_FIRST else len(LONG_FIRST)


def refusal(lane: Lane | None, processes: int) -> str:
    """Why the tests must not run in so many processes; empty where they may."""
    if processes < 2 or lane is Lane.OWN:
        return ""
    return (
        "tests that change what all share run alone: `pytest e2e --lane own --numprocesses 2`, then "
        "`pytest e2e --lane alone`; `make e2e` does both."
    )
