"""Inventory: how many nodes there are of each kind, where a kind is a GPU and how many of it one node has free.

    1,000 nodes -> {(A100-80GB, 8 free): 700, (A100-80GB, 5 free): 12, (L4-24GB, 4 free): 288}

Plans depend on kinds alone, so planning costs the same for ten nodes and for ten thousand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from millstream_operator.catalog.gpu import GpuCatalog, GpuPart
from millstream_operator.inventory.left_out import LeftOut


@dataclass(frozen=True)
class NodeKind:
    """`nodes` nodes, each with `gpus` free GPUs of one part."""

    part: GpuPart
    gpus: int
    nodes: int

    @cached_property
    def island_size(self) -> int:
        """GPUs that may share a layer: one NVLink island, or the node where the part has no NVLink."""
        return min(self.gpus, self.part.nvlink_island_size) if self.part.has_nvlink else self.gpus

    def groups(self, tensor_parallel_size: int) -> int:
        """Groups of that many GPUs in all nodes, no group across islands (or nodes, where it is larger than one)."""
        per_island = self.island_size // tensor_parallel_size
        if per_island:
            islands, rest = divmod(self.gpus, self.island_size)
            return self.nodes * (islands * per_island + rest // tensor_parallel_size)
        return self.nodes * (self.gpus // tensor_parallel_size)


@dataclass(frozen=True)
class Stock:
    """All nodes with one part: what a placement chooses from. Replicas may lie on nodes of different kinds."""

    part: GpuPart
    kinds: tuple[NodeKind, ...]

    @cached_property
    def gpus(self) -> int:
        """Of the node that has most of them free."""
        return max(kind.gpus for kind in self.kinds)

    @cached_property
    def island_size(self) -> int:
        return max(kind.island_size for kind in self.kinds)

    def groups(self, tensor_parallel_size: int) -> int:
        known = self._groups.get(tensor_parallel_size)
        if known is None:
            known = self._groups[tensor_parallel_size] = sum(kind.groups(tensor_parallel_size) for kind in self.kinds)
        return known

    @cached_property
    def _groups(self) -> dict[int, int]:
        return {}


@dataclass(frozen=True)
class Inventory:
    """`hypothetical`: no cluster, but one usual machine of each part, to learn what would be needed.

    `refused` are the nodes that do not count, `absent` the kinds of declared node pools that have no node yet.
    """

    kinds: tuple[NodeKind, ...]
    refused: tuple[LeftOut, ...] = ()
    hypothetical: bool = False
    absent: tuple[NodeKind, ...] = ()

    def stocks(self) -> tuple[Stock, ...]:
        """By part, in the order of their names."""
        return self._stocks

    @cached_property
    def _stocks(self) -> tuple[Stock, ...]:
        of_part: dict[str, list[NodeKind]] = {}
        for kind in self.kinds:
            of_part.setdefault(kind.part.name, []).append(kind)
        return tuple(Stock(kinds[-1].part, tuple(kinds)) for _, kinds in sorted(of_part.items()))

    def __str__(self) -> str:
        if self.hypothetical:
            return "any GPU of the catalogue, as one usual machine"
        return ", ".join(f"{kind.nodes} × {kind.gpus} {kind.part.name}" for kind in self.kinds) or "no GPUs"


def inventory_of(
    islands: Iterable[tuple[GpuPart, int]], refused: Iterable[LeftOut] = (), *, hypothetical: bool = False
) -> Inventory:
    """Group nodes, given as (part, free GPUs). Nodes without a free GPU do not count."""
    counted: Counter[tuple[str, int]] = Counter()
    parts: dict[str, GpuPart] = {}
    for part, gpus in islands:
        parts[part.name] = part
        if gpus > 0:
            counted[part.name, gpus] += 1
    kinds = tuple(NodeKind(parts[name], gpus, nodes) for (name, gpus), nodes in sorted(counted.items()))
    return Inventory(kinds, tuple(refused), hypothetical)


def whole_catalog(catalog: GpuCatalog) -> Inventory:
    """One usual machine of every part that the runtime supports, on a CPU that its image is built for."""
    return inventory_of(((part, part.gpus_per_node) for part in catalog if part.may_be_suggested), hypothetical=True)
