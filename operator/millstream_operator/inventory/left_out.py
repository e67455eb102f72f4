"""Nodes whose GPUs cannot be planned on, grouped by reason, each with what a person can do about it. Pure.

    (name, reason) of each node -> `Nodes gpu-1, gpu-2 and 9 more are left out: cordoned.`

A cluster has hundreds of nodes and few reasons, so verdicts name each reason once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_GROUPS = 8
SET_PARALLELISM = "set parallelism.tensor to plan from the spec alone"  # where the scheduler can place such pods
NAMES_SHOWN, MAX_NAME = 3, 80


@dataclass(frozen=True, slots=True, order=True)
class Why:
    """`problem` ends the sentence "Node a is left out: …"; `remedies` are instructions, each of which is enough.

    An instruction has no full stop, and NODE in it stands for the node's name.
    """

    problem: str
    remedies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Nodes (or declared node pools) with one reason. `names`: the first of them."""

    why: Why
    names: tuple[str, ...]
    count: int
    noun: str = "Node"

    @property
    def sentence(self) -> str:
        more = self.count - len(self.names)
        names = ", ".join(name[:MAX_NAME] for name in self.names) + (f" and {more} more" if more else "")
        if self.count == 1:
            return f"{self.noun} {names} is left out: {self.why.problem}."
        return f"{self.noun}s {names} are left out: {self.why.problem}."

    @property
    def remedies(self) -> tuple[str, ...]:
        """The instructions, for the first of the nodes."""
        return tuple(one.replace("NODE", self.names[0]) for one in self.why.remedies)


def grouped(nodes: Iterable[tuple[str, Why]], noun: str = "Node") -> tuple[LeftOut, ...]:
    """Group nodes by reason, the most frequent reason first."""
    of_reason: dict[Why, list[str]] = {}
    for name, why in nodes:
        of_reason.setdefault(why, []).append(name)
    ranked = sorted(of_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(
        LeftOut(why, tuple(sorted(names)[:NAMES_SHOWN]), len(names), noun) for why, names in ranked[:MAX_GROUPS]
    )
