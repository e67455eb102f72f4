"""Node objects -> Inventory. Pure: the same function reads `kubectl get nodes -o yaml` and the operator's watch.

GPUs are counted by `status.allocatable["nvidia.com/gpu"]`, their product by the label of GPU feature discovery. What is
no whole GPU (MIG, time-slicing) or cannot take a pod (cordoned, not ready) is left out and named with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millstream_operator.catalog.gpu import GpuCatalog, GpuPart
from millstream_operator.catalog.gpu_names import UnknownGPUError, find_part, slice_kind
from millstream_operator.inventory.node_kinds import Inventory, RefusedNode, inventory_of

GPU_RESOURCE = "nvidia.com/gpu"
PRODUCT_LABEL = "nvidia.com/gpu.product"
REPLICAS_LABEL = "nvidia.com/gpu.replicas"
MIG_RESOURCE_PREFIX = "nvidia.com/mig-"
MAX_NODES = 100_000


class NodesError(ValueError):
    """What was given is no list of nodes. `str()` is one sentence."""


def inventory_from_nodes(catalog: GpuCatalog, nodes: Iterable[Mapping[str, Any]]) -> Inventory:
    """The GPUs of `v1/Node` objects. Nodes without GPUs are passed over in silence."""
    found: list[tuple[GpuPart, int]] = []
    refused: list[RefusedNode] = []
    parts: dict[str, GpuPart | str] = {}  # label -> part, or why there is none: labels repeat, nodes are many
    for node in nodes:
        metadata, status = node.get("metadata") or {}, node.get("status") or {}
        name = str(metadata.get("name", "a node"))
        labels, allocatable = metadata.get("labels") or {}, status.get("allocatable") or {}
        gpus = _count(allocatable.get(GPU_RESOURCE))
        has_slices = any(key.startswith(MIG_RESOURCE_PREFIX) and _count(allocatable[key]) for key in allocatable)
        if not gpus and not has_slices:
            continue
        reason = "its GPUs are split by MIG, and Millstream plans whole GPUs" if has_slices else _unusable(node, labels)
        label = str(labels.get(PRODUCT_LABEL, ""))
        if reason is None and label not in parts:
            parts[label] = _part(catalog, label)
        if reason is None and isinstance(why := parts[label], str):
            reason = why
        if reason is not None:
            refused.append(RefusedNode(name, f"Node {name} is left out: {reason}."))
            continue
        part = parts[label]
        assert isinstance(part, GpuPart)  # noqa: S101 - the sentence was handled above
        found.append((part, gpus))
    return inventory_of(found, refused)


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


def _unusable(node: Mapping[str, Any], labels: Mapping[str, str]) -> str | None:
    label = str(labels.get(PRODUCT_LABEL, ""))
    if (kind := slice_kind(label)) is not None:
        return f"its label {PRODUCT_LABEL} is {label}, {kind}, and Millstream plans whole GPUs"
    if _count(labels.get(REPLICAS_LABEL)) > 1:
        return f"its GPUs are time-sliced ({REPLICAS_LABEL}={labels[REPLICAS_LABEL]}), and their memory is not reserved"
    if (node.get("spec") or {}).get("unschedulable"):
        return "it is cordoned"
    conditions = (node.get("status") or {}).get("conditions") or []
    ready = next((one.get("status") for one in conditions if one.get("type") == "Ready"), "True")
    return None if ready == "True" else "it is not Ready"


def _part(catalog: GpuCatalog, label: str) -> GpuPart | str:
    if not label:
        return f"it has no label {PRODUCT_LABEL}; GPU feature discovery sets it"
    try:
        return find_part(catalog, label)
    except UnknownGPUError as error:
        return str(error).removesuffix(".")


def _count(value: object) -> int:
    """Kubernetes writes counts as strings; anything else is no count."""
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0
