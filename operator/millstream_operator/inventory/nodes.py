"""Node objects -> Inventory. Pure: the same functions read `kubectl get nodes -o yaml` and the operator's watch.

GPUs are counted by `status.allocatable["nvidia.com/gpu"]`, their product by the label of GPU feature discovery. What is
no whole GPU (MIG, time-slicing) or cannot take a pod (cordoned, not ready) is left out and named with its reason.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.catalog.gpu import GpuCatalog, GpuPart
from millstream_operator.catalog.gpu_names import UnknownGPUError, find_part, slice_kind
from millstream_operator.inventory.demands import Taint, read_taints
from millstream_operator.inventory.node_kinds import Inventory, RefusedNode, inventory_of

GPU_RESOURCE = "nvidia.com/gpu"
PRODUCT_LABEL = "nvidia.com/gpu.product"
REPLICAS_LABEL = "nvidia.com/gpu.replicas"
MIG_RESOURCE_PREFIX = "nvidia.com/mig-"
MAX_NODES = 100_000


class NodesError(ValueError):
    """What was given is no list of nodes. `str()` is one sentence."""


@dataclass(frozen=True, slots=True)
class GpuNode:
    """What is kept of a node with GPUs: enough to plan on it, a thousandth of the object."""

    name: str
    product: str  # the node label; empty where GPU feature discovery does not run
    gpus: int  # allocatable
    unfit: str | None = None  # why its GPUs are no whole ones: lasts
    away: str | None = None  # why it takes no pod just now: passes
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()


def read_node(node: Mapping[str, Any]) -> GpuNode | None:
    """A `v1/Node` in short; None for a node without GPUs."""
    metadata, status = node.get("metadata") or {}, node.get("status") or {}
    labels, allocatable = metadata.get("labels") or {}, status.get("allocatable") or {}
    gpus = count(allocatable.get(GPU_RESOURCE))
    has_slices = any(key.startswith(MIG_RESOURCE_PREFIX) and count(allocatable[key]) for key in allocatable)
    if not gpus and not has_slices:
        return None
    split = "its GPUs are split by MIG, and Millstream plans whole GPUs"
    return GpuNode(
        name=str(metadata.get("name", "a node")),
        product=str(labels.get(PRODUCT_LABEL, "")),
        gpus=gpus,
        unfit=split if has_slices else _shared(labels),
        away=_away(node),
        labels={sys.intern(str(key)): sys.intern(str(value)) for key, value in labels.items()},
        taints=read_taints((node.get("spec") or {}).get("taints")),
    )


class Parts:
    """Node labels -> parts of a catalogue, each looked up once: labels repeat, nodes are many."""

    def __init__(self, catalog: GpuCatalog) -> None:
        self._catalog = catalog
        self._found: dict[str, GpuPart | str] = {}

    def of(self, node: GpuNode) -> GpuPart | str:
        """The part of a node's GPUs, or why they cannot be planned on at all."""
        if node.unfit is not None:
            return node.unfit
        if node.product not in self._found:
            self._found[node.product] = self._look_up(node.product)
        return self._found[node.product]

    def _look_up(self, label: str) -> GpuPart | str:
        if not label:
            return f"it has no label {PRODUCT_LABEL}; GPU feature discovery sets it"
        try:
            return find_part(self._catalog, label)
        except UnknownGPUError as error:
            return str(error).removesuffix(".")


def inventory_from_nodes(catalog: GpuCatalog, nodes: Iterable[Mapping[str, Any]]) -> Inventory:
    """All GPUs of `v1/Node` objects that can take pods now. Nodes without GPUs are passed over in silence."""
    parts, found, refused = Parts(catalog), [], []
    for node in filter(None, map(read_node, nodes)):
        part = node.unfit or node.away or parts.of(node)
        if isinstance(part, str):
            refused.append(left_out(node, part))
        else:
            found.append((part, node.gpus))
    return inventory_of(found, refused)


def left_out(node: GpuNode, reason: str) -> RefusedNode:
    return RefusedNode(node.name, f"Node {node.name} is left out: {reason}.")


def nodes_of(document: Any) -> list[Mapping[str, Any]]:
    """The nodes of what kubectl prints: a List, or one Node.

    Raises:
        NodesError: neither.
    """
    if isinstance(document, Mapping) and document.get("kind") == "Node":
        return [document]
    items = document.get("items") if isinstance(document, Mapping) else document
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise NodesError("holds no nodes; give it the output of `kubectl get nodes -o yaml`.")
    if len(items) > MAX_NODES:
        raise NodesError(f"holds {len(items)} nodes; at most {MAX_NODES} are read.")
    return items


def _shared(labels: Mapping[str, str]) -> str | None:
    label = str(labels.get(PRODUCT_LABEL, ""))
    if (kind := slice_kind(label)) is not None:
        return f"its label {PRODUCT_LABEL} is {label}, {kind}, and Millstream plans whole GPUs"
    if count(labels.get(REPLICAS_LABEL)) > 1:
        return f"its GPUs are time-sliced ({REPLICAS_LABEL}={labels[REPLICAS_LABEL]}), and their memory is not reserved"
    return None


def _away(node: Mapping[str, Any]) -> str | None:
    if (node.get("spec") or {}).get("unschedulable"):
        return "it is cordoned"
    conditions = (node.get("status") or {}).get("conditions") or []
    ready = next((one.get("status") for one in conditions if one.get("type") == "Ready"), "True")
    return None if ready == "True" else "it is not Ready"


def count(value: object) -> int:
    """Kubernetes writes counts as strings; anything else is no count."""
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0
