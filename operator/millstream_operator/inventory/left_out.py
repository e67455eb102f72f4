"""Nodes whose GPUs cannot be planned on, grouped by reason, each with what a person can do about it. Pure.

    Excluded(name, reason) of each node -> `Nodes gpu-1, gpu-2 and 9 more are left out: cordoned.`

A cluster has hundreds of nodes and few reasons, so verdicts name each reason once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_GROUPS = 8
SET_PARALLELISM = "set parallelism.tensor to plan from the spec alone"  # where the scheduler can place such pods
NAMES_SHOWN, MAX_NAME = 3, 80


@dataclass(frozen=True, slots=True, order=True)
class Why:
    """`problem` ends the sentence "Node a is left out: …"; `remedies` are instructions, each of which is enough.

    An instruction has no full stop, and NODE in it stands for the node's name. `tolerations`, as (key, value, effect),
    and no selection by the labels `selected_by` let such pods run there; both are empty where that is not enough.
    """

    problem: str
    remedies: tuple[str, ...]
    tolerations: tuple[tuple[str, str, str], ...] = ()
    selected_by: tuple[str, ...] = ()


class Excluded(NamedTuple):
    """A node, or a declared pool of up to `nodes`, that does not count.

    `gpus`: product and number per node; None: not known.
    """

    name: str
    why: Why
    gpus: tuple[str, int] | None = None
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Nodes (or declared node pools) with one reason. `names`: the first of them.

    `gpus` are those that would count if the reason was gone, as (product, GPUs per node, nodes). They are no part of
    equality: verdicts look at them, plans do not.
    """

    why: Why
    names: tuple[str, ...]
    count: int
    noun: str = "Node"
    gpus: tuple[tuple[str, int, int], ...] = field(default=(), compare=False)

    @property
    def sentence(self) -> str:
        more = self.count - len(self.names)
        names = ", ".join(name[:MAX_NAME] for name in self.names) + (f" and {more} more" if more else "")
        if self.count == 1:
            return f"{self.noun} {names} is left out: {self.why.problem}."
        return f"{self.noun}s {names} are left out: {self.why.problem}."

    @property
    def product_is_unknown(self) -> bool:
        """Whether the reason is that nothing says which GPUs these are."""
        return SET_PARALLELISM in self.why.remedies

    @property
    def remedies(self) -> tuple[str, ...]:
        """The instructions, for the first of the nodes."""
        return tuple(one.replace("NODE", self.names[0]) for one in self.why.remedies)


def grouped(nodes: Iterable[Excluded], noun: str = "Node") -> tuple[LeftOut, ...]:
    """Group nodes by reason, the most frequent reason first."""
    of_reason: dict[Why, list[Excluded]] = {}
    for node in nodes:
        of_reason.setdefault(node.why, []).append(node)
    ranked = sorted(of_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(_left_out(why, members, noun) for why, members in ranked[:MAX_GROUPS])


def _left_out(why: Why, members: list[Excluded], noun: str) -> LeftOut:
    gpus: Counter[tuple[str, int]] = Counter()
    for member in members:
        if member.gpus is not None and member.gpus[1] > 0:
            gpus[member.gpus] += member.nodes
    names = tuple(sorted(member.name for member in members)[:NAMES_SHOWN])
    kinds = tuple((*kind, nodes) for kind, nodes in sorted(gpus.items()))
    return LeftOut(why, names, len(members), noun, kinds)
