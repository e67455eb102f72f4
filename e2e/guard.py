"""Refuse a command that touches what all tests share, unless the test that runs has the mark for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from e2e.shared_things import LEFTOVER_LABEL, LEFTOVER_VALUE, SharedThing, touched, unlabelled


class SharedThingError(Exception):
    """A test touches what all share, and does not say so. The message names the thing and the fix."""


class Guard:
    """Which shared things the test that runs may touch, and which namespaces are its own.

    It holds no test back before `cluster_scoped` is known: what a kind without a namespace is called, in small letters,
    -> the kind.
    """

    def __init__(self) -> None:
        self.own_namespaces: set[str] = set()
        self.cluster_scoped: Mapping[str, str] = {}
        self._allowed: frozenset[SharedThing] = frozenset()
        self._used: set[SharedThing] = set()
        self._is_open = False

    def begin_test(self, allowed: Collection[SharedThing]) -> None:
        """From here on commands are those of a test with these marks."""
        self._allowed, self._used = frozenset(allowed), set()

    def unused(self) -> frozenset[SharedThing]:
        """The things that the test has marks for and did not touch."""
        return self._allowed - self._used

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Allow everything for a block: what prepares a run belongs to no test."""
        before, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = before

    def check(self, command: Sequence[str], stdin: str | None = None) -> None:
        """Return where the test may run the command.

        Raises:
            SharedThingError: it touches what all tests share.
        """
        if self._is_open:
            return
        for one in touched(command, stdin, self.own_namespaces, self.cluster_scoped):
            if not self._allowed.intersection(one.things):
                raise SharedThingError(refusal(one.what, one.things[0]))
            self._used |= self._allowed.intersection(one.things)
        if names := unlabelled(command, stdin, self.own_namespaces, self.cluster_scoped):
            raise SharedThingError(
                f"{', '.join(names)} would outlive an interrupted run: give it the label {LEFTOVER_LABEL}: "
                f"{LEFTOVER_VALUE}, by which the next run finds and deletes it (e2e/leftovers.py)."
            )


def refusal(what: str, thing: SharedThing) -> str:
    """Why a test must not do this, and how it may."""
    return (
        f"{what} touches {thing}, which all tests share: mark the test with @pytest.mark.shared(SharedThing."
        f"{thing.name}), so that it runs alone (e2e/shared_things.py)."
    )
