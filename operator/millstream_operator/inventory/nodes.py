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
from millstream_operator.inventory.left_out import SET_PARALLELISM, Excluded, Why, grouped
from millstream_operator.inventory.node_kinds import Inventory, inventory_of

GPU_RESOURCE = "nvidia.com/gpu"
PRODUCT_LABEL = "nvidia.com/gpu.product"
REPLICAS_LABEL = "nvidia.com/gpu.replicas"
MIG_RESOURCE_PREFIX = "nvidia.com/mig-"
MAX_NODES = 100_000
WHOLE_GPUS = ("give Millstream nodes whose GPUs are whole",)
SPLIT = Why("GPUs split by MIG, and Millstream plans whole GPUs", WHOLE_GPUS)
UNLABELLED = Why(
    f"no label {PRODUCT_LABEL}, which GPU feature discovery sets",
    (
        "install GPU feature discovery",
        f"label the nodes (such as kubectl label node NODE {PRODUCT_LABEL}=NVIDIA-A100-SXM4-80GB)",
        SET_PARALLELISM,
    ),
)
CORDONED = Why("cordoned", ("run kubectl uncordon NODE",))
NOT_READY = Why("not Ready", ("see kubectl describe node NODE",))


class NodesError(ValueError):
    """What was given is no list of nodes. `str()` is one sentence."""


@dataclass(frozen=True, slots=True)
class GpuNode:
    """What is kept of a node with GPUs: enough to plan on it, a thousandth of the object."""

    name: str
    product: str  # the node label; empty where GPU feature discovery does not run
    gpus: int  # allocatable
    unfit: Why | None = None  # why its GPUs are no whole ones: lasts
    away: Why | None = None  # why it takes no pod just now: passes
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
    return GpuNode(
        name=str(metadata.get("name", "a node")),
        product=str(labels.get(PRODUCT_LABEL, "")),
        gpus=gpus,
        unfit=SPLIT if has_slices else _shared(labels),
        away=_away(node),
        labels={sys.intern(str(key)): sys.intern(str(value)) for key, value in labels.items()},
        taints=read_taints((node.get("spec") or {}).get("taints")),
    )


class Parts:
    """Node labels -> parts of a catalogue, each looked up once: labels repeat, nodes are many."""

    def __init__(self, catalog: GpuCatalog) -> None:
        self._catalog = catalog
        self._found: dict[str, GpuPart | Why] = {}

    def of(self, node: GpuNode) -> GpuPart | Why:
        """The part of a node's GPUs, or why they cannot be planned on at all."""
        return node.unfit if node.unfit is not None else self.of_product(node.product)

    def of_product(self, product: str) -> GpuPart | Why:
        """The part of a node label's value, or of another name of a GPU."""
        if product not in self._found:
            self._found[product] = self._look_up(product)
        return self._found[product]

    def _look_up(self, product: str) -> GpuPart | Why:
        if not product:
            return UNLABELLED
        try:
            return find_part(self._catalog, product)
        except UnknownGPUError as error:
            remedies = ("describe this GPU in the chart's value catalog.gpus", SET_PARALLELISM)
            return Why(str(error).removesuffix("."), remedies)


def inventory_from_nodes(catalog: GpuCatalog, nodes: Iterable[Mapping[str, Any]]) -> Inventory:
    """All GPUs of `v1/Node` objects that can take pods now. Nodes without GPUs are passed over in silence."""
    parts, found = Parts(catalog), []
    refused: list[Excluded] = []
    for node in filter(None, map(read_node, nodes)):
        part = node.unfit or node.away or parts.of(node)
        if isinstance(part, Why):
            refused.append(Excluded(node.name, part))
        else:
            found.append((part, node.gpus))
    return inventory_of(found, grouped(refused))


def nodes_of(document: Any) -> list[Mapping[str, Any]]:
    """The nodes of what kubectl prints: a List, or one Node.

    Raises:
        NodesError: neither.
    """
    return _items_of(document, "Node", "nodes", "kubectl get nodes -o yaml")


def pods_of(document: Any) -> list[Mapping[str, Any]]:
    """The pods of what kubectl prints: a List, or one Pod.

    Raises:
        NodesError: neither.
    """
    return _items_of(document, "Pod", "pods", "kubectl get pods --all-namespaces -o yaml")


def _items_of(document: Any, kind: str, plural: str, command: str) -> list[Mapping[str, Any]]:
    if isinstance(document, Mapping) and document.get("kind") == kind:
        return [document]
    items = document.get("items") if isinstance(document, Mapping) else document
    if not isinstance(items, list) or not all(
        isinstance(item, Mapping) and item.get("kind") in (None, kind) for item in items
    ):
        raise NodesError(f"holds no {plural}; give it the output of `{command}`.")
    if len(items) > MAX_NODES:
        raise NodesError(f"holds {len(items)} {plural}; at most {MAX_NODES} are read.")
    return items


def _shared(labels: Mapping[str, str]) -> Why | None:
    label = str(labels.get(PRODUCT_LABEL, ""))
    if (kind := slice_kind(label)) is not None:
        return Why(f"the label {PRODUCT_LABEL} is {label}, {kind}, and Millstream plans whole GPUs", WHOLE_GPUS)
    if count(labels.get(REPLICAS_LABEL)) > 1:
        times = f"{REPLICAS_LABEL}={labels[REPLICAS_LABEL]}"
        return Why(f"time-sliced GPUs ({times}), whose memory is not reserved", WHOLE_GPUS)
    return None


def why_closed(node: Mapping[str, Any]) -> str | None:
    """Why a node, with GPUs or without, takes no pods now: `cordoned`. None: it does."""
    away = _away(node)
    return away.problem if away is not None else None


def _away(node: Mapping[str, Any]) -> Why | None:
    if (node.get("spec") or {}).get("unschedulable"):
        return CORDONED
    conditions = (node.get("status") or {}).get("conditions") or []
    ready = next((one.get("status") for one in conditions if one.get("type") == "Ready"), "True")
    return None if ready == "True" else NOT_READY


def count(value: object) -> int:
    """Kubernetes writes counts as strings; anything else is no count."""
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0
