"""Nodes as the API server has them -> GPUs to plan on; what is no whole, usable GPU is left out with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.catalog.gpu import load_catalog
from millstream_operator.catalog.gpu_names import find_part
from millstream_operator.inventory.node_kinds import Inventory, NodeKind, inventory_of
from millstream_operator.inventory.nodes import NodesError, inventory_from_nodes, nodes_of

CATALOG = load_catalog()
A100 = "NVIDIA-A100-SXM4-80GB"


def node(name: str = "a", product: str | None = A100, gpus: object = "8", **changes: Any) -> dict[str, Any]:
    labels = {"nvidia.com/gpu.product": product} if product else {}
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": labels | changes.get("labels", {})},
        "spec": changes.get("spec", {}),
        "status": {
            "allocatable": {"cpu": "64", "nvidia.com/gpu": gpus} | changes.get("allocatable", {}),
            "conditions": changes.get("conditions", [{"type": "Ready", "status": "True"}]),
        },
    }


def test_nodes_of_one_kind_are_counted_together() -> None:
    found = inventory_from_nodes(CATALOG, [node("a"), node("b"), node("c", gpus="4"), node("d", "NVIDIA-L4", "1")])
    assert [(kind.part.name, kind.gpus, kind.nodes) for kind in found.kinds] == [
        ("A100-80GB", 4, 1),
        ("A100-80GB", 8, 2),
        ("L4-24GB", 1, 1),
    ]
    assert found.refused == ()


@pytest.mark.parametrize("gpus", ["0", None, "", "many", "-1", 1.5, "9" * 30])
def test_a_node_without_gpus_is_passed_over(gpus: object) -> None:
    assert inventory_from_nodes(CATALOG, [node(gpus=gpus)]) == Inventory(())


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (node(product=f"{A100}-MIG-1g.10gb"), "MIG"),
        (node(gpus="0", allocatable={"nvidia.com/mig-1g.10gb": "7"}), "split by MIG"),
        (node(product="NVIDIA-L4-SHARED"), "time-sliced"),
        (node(labels={"nvidia.com/gpu.replicas": "4"}), "nvidia.com/gpu.replicas=4"),
        (node(product=None), "GPU feature discovery"),
        (node(product="NVIDIA-L9"), "'NVIDIA-L9' is not in the catalogue"),
        (node(spec={"unschedulable": True}), "cordoned"),
        (node(conditions=[{"type": "Ready", "status": "Unknown"}]), "not Ready"),
    ],
)
def test_what_cannot_be_planned_on_is_named_with_its_reason(refused: dict[str, Any], said: str) -> None:
    found = inventory_from_nodes(CATALOG, [refused, node("good")])
    assert [kind.nodes for kind in found.kinds] == [1]
    (line,) = found.refused
    assert line.names == ("a",)
    assert said in line.sentence
    assert "\n" not in line.sentence


@pytest.mark.parametrize(
    ("part", "gpus", "tensor", "groups"),
    [
        ("A100-80GB", 8, 4, 2),
        ("A100-80GB", 8, 3, 2),
        ("A100-80GB-PCIe", 4, 2, 2),  # two bridged pairs
        ("A100-80GB-PCIe", 4, 4, 1),  # across pairs, over PCIe
        ("A100-80GB-PCIe", 3, 1, 3),
        ("L4", 4, 4, 1),  # no NVLink: the node
        ("L4", 4, 8, 0),
    ],
)
def test_groups_stay_in_an_island(part: str, gpus: int, tensor: int, groups: int) -> None:
    assert NodeKind(find_part(CATALOG, part), gpus, 3).groups(tensor) == 3 * groups


def test_replicas_may_lie_on_nodes_of_different_kinds() -> None:
    a100 = find_part(CATALOG, "A100-80GB")
    (stock,) = inventory_of([(a100, 8), (a100, 6), (a100, 3)]).stocks()
    assert (stock.gpus, stock.island_size) == (8, 8)
    assert [stock.groups(size) for size in (1, 2, 4, 8)] == [17, 8, 3, 1]


def test_what_kubectl_prints_is_read_and_nothing_else() -> None:
    assert len(nodes_of({"kind": "List", "items": [node(), node("b")]})) == 2
    assert len(nodes_of(node())) == 1
    for bad in (None, 3, "nodes", {}, {"items": "x"}, {"items": [1]}):
        with pytest.raises(NodesError):
            nodes_of(bad)
