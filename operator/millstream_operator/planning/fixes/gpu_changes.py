"""Nodes that are added to the cluster: more GPUs of a product that it has or the spec names, or of another one."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.spec import Accelerator, AcceleratorType
from millstream_operator.catalog.gpu import GpuCatalog, GpuPart
from millstream_operator.catalog.gpu_names import UnknownGPUError, find_part
from millstream_operator.inventory.node_kinds import Inventory, NodeKind
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.admitted_parts import admits_part
from millstream_operator.planning.fixes.change import Change, edit
from millstream_operator.planning.fixes.least_change import Replan
from millstream_operator.planning.plan import GPUS_FIELD, Infeasible, Plan
from millstream_operator.planning.resolved_spec import wanted_replicas

MAX_NODES = 64  # to try: beyond that, another product or a smaller wish is the nearer answer
Planned = tuple[Change, Plan | Infeasible]


def gpu_changes(deployment: LLMDeployment, facts: Facts, replan: Replan) -> Iterator[Change]:
    """Yield nodes to add, one change per product: those of the spec or the cluster first, then the cheapest plan first.

    Each names as many GPUs as its plan takes. A product that leads to no plan is yielded as whole nodes: another edit
    may still be missing.
    """
    on_cpu = (deployment.spec.accelerator or Accelerator()).type is AcceleratorType.CPU
    if facts.inventory is None or facts.inventory.hypothetical or on_cpu:
        return
    named = _named(deployment, facts)
    near = named or list({kind.part.name: kind.part for kind in (facts.capacity or facts.inventory).kinds}.values())
    names = {part.name for part in near}
    others = [part for part in facts.catalog if part.may_be_suggested and part.name not in names]
    near, others = ([part for part in parts if admits_part(deployment, part)] for parts in (near, others))
    found = [
        [(change, replan(change.deployment, change.facts)) for change in _whole_nodes(deployment, facts, parts)]
        for parts in (near, others)
    ]
    for in_one_node in (True, False):
        for of_parts in found:
            for change, planned in _cheapest_and_smallest(of_parts, facts.catalog):
                if in_one_node == (isinstance(planned, Plan) and planned.pipeline_parallel_size == 1):
                    yield just_enough(facts, replan, change, planned) if isinstance(planned, Plan) else change


def _cheapest_and_smallest(found: list[Planned], catalog: GpuCatalog) -> list[Planned]:
    """The cheapest, then the one with the fewest GPUs, then the others by price; last what leads to no plan."""
    by_price = sorted(found, key=lambda one: _price(one, catalog))
    feasible = [one for one in by_price if isinstance(one[1], Plan)]
    if len(feasible) < 2:
        return by_price
    smallest = min(feasible[1:], key=lambda one: one[1].gpus_per_replica if isinstance(one[1], Plan) else 0)
    return [feasible[0], smallest, *(one for one in by_price if one is not feasible[0] and one is not smallest)]


def _named(deployment: LLMDeployment, facts: Facts) -> list[GpuPart]:
    """The products of the spec that can be planned on."""
    found = []
    for name in (deployment.spec.accelerator or Accelerator()).products or ():
        try:
            part = find_part(facts.catalog, name)
        except UnknownGPUError:
            continue
        if part.unsupported is None:
            found.append(part)
    return found


def _whole_nodes(deployment: LLMDeployment, facts: Facts, parts: list[GpuPart]) -> Iterator[Change]:
    """Yield many usual nodes of each part: more than the replicas need."""
    for part in parts:
        most = max(part.gpus_per_node, max((kind.gpus for kind in _kinds(facts) if kind.part == part), default=0))
        if (change := _added(deployment, facts, part, most, MAX_NODES)) is not None:
            yield change


def _price(found: Planned, catalog: GpuCatalog) -> tuple[bool, bool, float, str]:
    """By the price of a replica; GPUs that would share layers over PCIe come after those with NVLink."""
    change, planned = found
    if not isinstance(planned, Plan) or planned.cost is None:
        return True, False, 0.0, change.value
    part = catalog.get(planned.product or "")
    island = part.nvlink_island_size if part is not None and part.has_nvlink else 1
    over_pcie = planned.tensor_parallel_size > island
    return False, over_pcie, planned.cost.hourly_milli_usd / (planned.replicas or 1), change.value


def just_enough(facts: Facts, replan: Replan, change: Change, planned: Plan) -> Change:
    """Return the change with the fewest GPUs with which its plan is made and need not wait: those that are there count.

    `facts`: those before any node was added.
    """
    if planned.product is None:
        return change
    part = find_part(facts.catalog, planned.product)
    replicas = max(planned.replicas or 1, wanted_replicas(change.deployment.spec))
    others = tuple(one for one in change.fields if one[0] != GPUS_FIELD)

    def with_room_for(count: int) -> Change:
        nodes, gpus = _nodes_for(planned, part, count)
        trimmed = _added(change.deployment, facts, part, gpus, nodes)
        return replace(trimmed, fields=(*trimmed.fields, *others)) if trimmed is not None else change

    def is_enough(count: int) -> bool:
        made = with_room_for(count)
        found = replan(made.deployment, made.facts)
        return isinstance(found, Plan) and not found.requires and not found.waits

    return with_room_for(bisect.bisect_left(range(1, replicas), True, key=is_enough) + 1)


def _nodes_for(planned: Plan, part: GpuPart, replicas: int) -> tuple[int, int]:
    """Equal nodes for some replicas of a plan, as few as a usual node allows, and the GPUs of each."""
    if planned.pipeline_parallel_size > 1:
        return replicas * planned.pipeline_parallel_size, planned.tensor_parallel_size
    in_node = max(1, max(part.gpus_per_node, planned.tensor_parallel_size) // planned.gpus_per_replica)
    nodes = -(-replicas // in_node)
    return nodes, planned.gpus_per_replica * -(-replicas // nodes)


def _added(deployment: LLMDeployment, facts: Facts, part: GpuPart, gpus: int, nodes: int) -> Change | None:
    """`nodes` more nodes with `gpus` GPUs of a part, and the spec that may use them."""
    value = f"{part.name}:{gpus}" if nodes == 1 else f"{nodes} nodes of {part.name}:{gpus}"
    fields: tuple[tuple[str, str], ...] = ((GPUS_FIELD, value),)
    products = (deployment.spec.accelerator or Accelerator()).products
    named = _named(deployment, facts)
    if products and part not in named:
        changed = edit(deployment, facts, accelerator__products=[*(one.name for one in named), part.name])
        if changed is None:
            return None
        deployment, fields = changed.deployment, (*fields, *changed.fields)
    return Change(fields, deployment, _with_nodes(facts, NodeKind(part, gpus, nodes)), adds_nodes=True)


def _kinds(facts: Facts) -> tuple[NodeKind, ...]:
    everything = facts.capacity or facts.inventory
    return everything.kinds if everything is not None else ()


def _with_nodes(facts: Facts, added: NodeKind) -> Facts:
    inventory, capacity = facts.inventory, facts.capacity
    assert inventory is not None  # noqa: S101 - the caller asked
    return replace(
        facts,
        inventory=_plus(inventory, added),
        capacity=_plus(capacity, added) if capacity is not None else None,
    )


def _plus(inventory: Inventory, added: NodeKind) -> Inventory:
    counted: Counter[tuple[str, int]] = Counter()
    parts: dict[str, GpuPart] = {}
    for kind in (*inventory.kinds, added):
        parts[kind.part.name] = kind.part
        counted[kind.part.name, kind.gpus] += kind.nodes
    kinds = tuple(NodeKind(parts[name], gpus, nodes) for (name, gpus), nodes in sorted(counted.items()))
    return replace(inventory, kinds=kinds)
