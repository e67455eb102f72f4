"""Nodes that do not count, in the words of a verdict: which of them would hold the model, and what includes them. Pure.

Node gpu-1 is left out: the pods do not tolerate the taint dedicated=search:NoSchedule.
The model would fit there as 4×A100-80GB TP4: add {key: dedicated, …} to podTemplate.spec.tolerations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from millstream_operator.catalog.gpu import GpuCatalog
from millstream_operator.inventory.left_out import SET_PARALLELISM, LeftOut
from millstream_operator.inventory.node_kinds import Inventory, NodeKind
from millstream_operator.inventory.unknown_gpus import sentence_of
from millstream_operator.planning.choices.outcome import Problem
from millstream_operator.planning.choices.placement import Choice, NoPlacement
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import PlanReason

Search = Callable[[Facts], Choice | NoPlacement]
MAX_REASON, MAX_MESSAGE = 1000, 1000  # of the 1024 characters that the status allows each


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of one group of nodes. `fits_as`: the placement that it would make possible.

    `problem`: why it makes none possible; None where it does, or where its GPUs are not known.
    """

    group: LeftOut
    fits_as: str | None
    problem: Problem | None = None

    @property
    def sentence(self) -> str:
        """Why the nodes are left out and, where that may help, the edit that includes them."""
        remedies = [remedy for remedy in self.group.remedies if remedy != SET_PARALLELISM]
        text = self.group.sentence
        if self.fits_as is not None and remedies:
            instruction = sentence_of(remedies)
            text = f"{text} The model would fit there as {self.fits_as}: {instruction[:1].lower()}{instruction[1:]}"
        elif not self.group.gpus and remedies and self.group.product_is_unknown:
            text = f"{text} {sentence_of(remedies)}"
        return text if len(text) <= MAX_REASON else self.group.sentence[:MAX_REASON]


def verdicts(groups: Sequence[LeftOut], facts: Facts, search: Search) -> list[Verdict]:
    """Try each group next to what `facts` have already; those that would help come first."""
    found = [_verdict(group, facts, search) for group in groups]
    return sorted(found, key=lambda verdict: verdict.fits_as is None)


def with_group(facts: Facts, group: LeftOut) -> Facts:
    """The facts of a cluster whose nodes of one group count too, for now and for later."""
    kinds = kinds_of(group, facts.catalog)
    inventory = facts.inventory or Inventory(())
    capacity = replace(facts.capacity, kinds=merged(facts.capacity.kinds, kinds)) if facts.capacity else None
    return replace(
        facts,
        inventory=replace(inventory, kinds=merged(inventory.kinds, kinds)),
        capacity=capacity,
        unknown_gpus=None,
    )


def kinds_of(group: LeftOut, catalog: GpuCatalog) -> tuple[NodeKind, ...]:
    found = ((catalog.get(name), gpus, nodes) for name, gpus, nodes in group.gpus)
    return tuple(NodeKind(part, gpus, nodes) for part, gpus, nodes in found if part is not None)


def merged(some: Sequence[NodeKind], others: Sequence[NodeKind]) -> tuple[NodeKind, ...]:
    """Both, with the nodes of equal kinds added up, in a fixed order."""
    found = {(kind.part.name, kind.gpus): kind for kind in some}
    for kind in others:
        known = found.get((kind.part.name, kind.gpus))
        found[kind.part.name, kind.gpus] = replace(kind, nodes=kind.nodes + (known.nodes if known is not None else 0))
    return tuple(kind for _, kind in sorted(found.items()))


def reasons(found: Sequence[Verdict]) -> list[PlanReason]:
    return [PlanReason("nodes", verdict.sentence) for verdict in found]


def plain_reasons(groups: Sequence[LeftOut]) -> list[PlanReason]:
    """For a plan that does not need them: why they are left out, and no more."""
    return [PlanReason("nodes", group.sentence) for group in groups]


def with_sentences(message: str, said: Sequence[PlanReason]) -> str:
    """A message, and after it what is said of the nodes that do not count, as far as there is room."""
    for reason in said:
        if len(message) + len(reason.reason) < MAX_MESSAGE:
            message = f"{message} {reason.reason}"
    return message


def _verdict(group: LeftOut, facts: Facts, search: Search) -> Verdict:
    if not group.gpus:
        return Verdict(group, None)
    wider = with_group(replace(facts, capacity=None), group)
    assert wider.inventory is not None  # noqa: S101 - it has at least the group
    choice = search(replace(wider, inventory=replace(wider.inventory, refused=())))
    if isinstance(choice, Choice):
        return Verdict(group, choice.best.candidate.summary)
    return Verdict(group, None, choice.problem)
