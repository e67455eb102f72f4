"""Changes of the GPUs: more per node, more nodes, another product. The nearest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.inventory.node_kinds import Inventory, NodeKind, inventory_of
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.change import Change, with_field


def more_gpus(constraint: str, deployment: LLMDeployment, facts: Facts) -> Iterator[Change]:
    """Twice the GPUs in a node, up to what such nodes have; then more nodes, which hold more but are no faster."""
    if facts.inventory is None or facts.inventory.hypothetical:
        return
    largest = [max(stock.kinds, key=lambda kind: (kind.gpus, kind.nodes)) for stock in facts.inventory.stocks()]
    for kind in largest:
        gpus = kind.gpus
        while (gpus := gpus * 2) <= kind.part.gpus_per_node:
            yield Change("gpus", f"{kind.part.name}:{gpus}", deployment, _with_nodes(facts, kind, gpus, kind.nodes))
    for kind in largest if constraint in ("memory", "load", "inventory") else ():
        for factor in (2, 4, 8):
            nodes = kind.nodes * factor
            value = f"{nodes} nodes of {kind.part.name}:{kind.gpus}"
            yield Change("nodes", value, deployment, _with_nodes(facts, kind, kind.gpus, nodes))


def present_products(deployment: LLMDeployment, facts: Facts) -> Iterator[Change]:
    """GPUs that are there, for a spec that names others."""
    stocks = facts.inventory.stocks() if facts.inventory is not None else ()
    for stock in sorted(stocks, key=lambda stock: (stock.part.hourly_milli_usd, stock.part.name)):
        path, names = "accelerator.products", [stock.part.name]
        yield Change(path, stock.part.name, with_field(deployment, path, names), facts)


def other_products(deployment: LLMDeployment, facts: Facts) -> Iterator[Change]:
    """A GPU that the inventory lacks: as many as it has now, the cheapest first."""
    if facts.inventory is None:
        return
    present = {kind.part.name for kind in facts.inventory.kinds}
    count = max((kind.gpus for kind in facts.inventory.kinds), default=1)
    nodes = max((kind.nodes for kind in facts.inventory.kinds), default=1)
    others = [part for part in facts.catalog if part.unsupported is None and part.name not in present]
    freed = with_field(deployment, "accelerator.products", None)
    for part in sorted(others, key=lambda part: (part.hourly_milli_usd, part.name)):
        gpus = min(count, part.gpus_per_node)
        other = replace(facts, inventory=inventory_of([(part, gpus)] * min(nodes, 64)))
        yield Change("accelerator.products", f"{part.name}:{gpus}", freed, other)


def _with_nodes(facts: Facts, kind: NodeKind, gpus: int, nodes: int) -> Facts:
    return replace(facts, inventory=Inventory((NodeKind(kind.part, gpus, nodes),)))
