"""Search the free GPUs first, then all of them: a plan that waits for GPUs is better than none.

free GPUs -> a choice                                    the usual case
none feasible -> all GPUs, free or not -> a choice that waits: its pods stay Pending until GPUs are free
none feasible either -> machines that may come (products of the spec that no node has) -> a choice that waits for one
none feasible at all -> the binding constraint of what came farthest, because waiting would not help
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from millstream_operator.inventory.node_kinds import Inventory
from millstream_operator.planning.choices.outcome import Outcome
from millstream_operator.planning.choices.placement import Choice, NoPlacement
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import PlanReason

Search = Callable[[Facts, bool], Choice | NoPlacement]  # the second: also explain the alternatives


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`facts`: those that the choice was made on. `waits`: why its pods wait; None: they do not.

    `preferred`: the placement that would have been chosen if no GPU was taken, where it is another one.
    """

    choice: Choice | NoPlacement
    facts: Facts
    waits: PlanReason | None = None
    preferred: str | None = None


def search_in_order(
    search: Search, facts: Facts, may_come: tuple[Inventory, PlanReason] | None, *, explain: bool
) -> SearchResult:
    """Search the free GPUs, then all of them, then machines that may come, given with why such a plan waits."""
    found = search_free_then_all(search, facts, explain=explain)
    if may_come is None or not isinstance(found.choice, NoPlacement):
        return found
    machines, why = may_come
    choice = search(replace(facts, inventory=machines, capacity=None), explain)
    if not isinstance(choice, NoPlacement):
        return SearchResult(choice, found.facts, why)
    return found if choice.problem.stage <= found.choice.problem.stage else SearchResult(choice, found.facts)


def search_free_then_all(search: Search, facts: Facts, *, explain: bool) -> SearchResult:
    """Search the free GPUs, then all of them."""
    found = search(facts, explain)
    everything = facts.capacity
    if everything is None or facts.inventory is None or everything.kinds == facts.inventory.kinds:
        return SearchResult(found, facts)
    wide = replace(facts, inventory=everything, capacity=None)
    if isinstance(found, NoPlacement):
        found = search(wide, explain)
        if isinstance(found, NoPlacement):
            return SearchResult(found, wide)
        return SearchResult(found, wide, _why_it_waits(found.best, facts.inventory, everything))
    best = search(wide, False)
    if isinstance(best, Choice) and best.best.candidate.summary != found.best.candidate.summary:
        return SearchResult(found, facts, preferred=best.best.candidate.summary)
    return SearchResult(found, facts)


def _why_it_waits(best: Outcome, free: Inventory, everything: Inventory) -> PlanReason:
    """`everything` also has the declared node pools: where it needs one of those, a node must come first."""
    candidate, name = best.candidate, best.candidate.stock.part.name
    room = sum(kind.groups(candidate.tensor) for kind in free.kinds if kind.part.name == name) // candidate.pipeline
    wanted = f"{best.replicas} × {candidate.gpus} {name} are wanted and there is room for {room} now"
    if any(kind.part.name == name and kind.gpus >= candidate.tensor for kind in everything.absent):
        why, then = "are of a declared node pool", "a node of the pool is there or others give theirs back"
    elif set(free.refused) - set(everything.refused):
        why, then = "are taken, or their nodes take no pods", "others give theirs back or the nodes do"
    else:
        why, then = "are taken", "others give theirs back"
    return PlanReason("inventory", f"The GPUs {why}: {wanted}, so pods wait until {then}.")
