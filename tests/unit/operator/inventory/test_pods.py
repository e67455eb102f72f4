"""How many GPUs a pod holds, and on which node; pods that hold none are not remembered."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.inventory.pods import gpus_of, holds_gpus


def container(gpus: object = None, part: str = "limits", **more: Any) -> dict[str, Any]:
    return {"resources": {part: {"nvidia.com/gpu": gpus}} if gpus is not None else {}} | more


def pod(*containers: dict[str, Any], init: tuple[dict[str, Any], ...] = (), **changes: Any) -> dict[str, Any]:
    spec = {"nodeName": "a", "containers": list(containers), "initContainers": list(init)}
    return {"spec": spec | changes.get("spec", {}), "status": {"phase": changes.get("phase", "Running")}}


@pytest.mark.parametrize(
    ("found", "gpus"),
    [
        (pod(container("2")), 2),
        (pod(container("2", "requests")), 2),
        (pod(container("2"), container("1")), 3),
        (pod(container()), 0),
        (pod(container("1"), init=(container("4"),)), 4),
        (pod(container("3"), init=(container("2"),)), 3),
        (pod(container("3"), init=(container("2", restartPolicy="Always"),)), 5),
        (pod(container("many")), 0),
        ({}, 0),
    ],
)
def test_gpus_are_those_of_the_containers_together(found: dict[str, Any], gpus: int) -> None:
    assert gpus_of(found) == gpus


def test_a_bound_pod_that_runs_holds_them() -> None:
    assert holds_gpus(pod(container("2"))) == ("a", 2)
    assert holds_gpus(pod(container("2"), phase="Pending")) == ("a", 2), "bound, and pulling its image"


@pytest.mark.parametrize(
    "found",
    [
        pod(container()),
        pod(container("2"), spec={"nodeName": ""}),
        pod(container("2"), phase="Succeeded"),
        pod(container("2"), phase="Failed"),
    ],
)
def test_a_pod_without_gpus_without_node_or_that_has_ended_holds_nothing(found: dict[str, Any]) -> None:
    assert holds_gpus(found) is None
