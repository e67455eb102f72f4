"""Which process of pytest-xdist runs which test of a lane: tests one by one, but those of one served model together.

pytest-xdist's own groups (`--dist loadgroup`) do nothing under pytest 9.2: they are a suffix of a test's `_nodeid`, and
tests have no such attribute any more.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

# The files with tests of the fixture `served`: one process makes the model, and runs all of them.
SERVED_FILES = frozenset({"test_api.py", "test_chat.py", "test_repair.py"})


class LaneScheduling(LoadScopeScheduling):  # type: ignore[misc] # it has no types
    """Hands out the largest group first, then the others in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(node_id: str) -> str:
    """The name of the group that a test belongs to: tests of a group run in one process."""
    file = node_id.partition("::")[0].rpartition("/")[2]
    return "served" if file in SERVED_FILES else node_id
