"""GPU nodes that only exist as objects: labelled and sized as NVIDIA's GPU feature discovery and device plugin do it.

kwok keeps them Ready and lets the pods on them run. Nothing is computed there.
"""

from __future__ import annotations

import asyncio

from tests.soak.api import Api, Object, eventually

GPUS_A_NODE = 8
# The scheduler spreads pods over nodes. With more nodes than pods, every plan sees a node with all of its GPUs free, as
# the run without a fault did: a plan lists what it rejected.
NODES = 40


def gpu_node(number: int) -> Object:
    """One node with eight A100 of 80 GB on one NVLink island, in one of three zones."""
    resources = {
        "cpu": "96",
        "memory": "1Ti",
        "pods": "250",
        "ephemeral-storage": "2Ti",
        "nvidia.com/gpu": str(GPUS_A_NODE),
    }
    name = f"gpu-{number:04}"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "topology.kubernetes.io/zone": f"zone-{number % 3}",
                "nvidia.com/gpu.present": "true",
                "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB",
                "nvidia.com/gpu.memory": "81920",
                "nvidia.com/gpu.count": str(GPUS_A_NODE),
                "nvidia.com/gpu.family": "ampere",
                "nvidia.com/gpu.compute.major": "8",
                "nvidia.com/gpu.compute.minor": "0",
                "nvidia.com/mig.capable": "true",
                "nvidia.com/mig.strategy": "none",
                "nvidia.com/gpu.sharing-strategy": "none",
            },
        },
        "status": {"capacity": resources, "allocatable": resources},
    }


async def add_nodes(admin: Api, count: int) -> None:
    """Create them and wait until all are Ready."""
    waiting = iter(range(count))

    async def create() -> None:
        for number in waiting:
            await admin.create("/api/v1/nodes", gpu_node(number))

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(create())
    await eventually(lambda: _ready(admin), lambda ready: ready >= count, what=f"{count} nodes Ready", seconds=120)


async def _ready(admin: Api) -> int:
    nodes = await admin.items("/api/v1/nodes")
    return sum(
        any(c["type"] == "Ready" and c["status"] == "True" for c in node.get("status", {}).get("conditions", []))
        for node in nodes
    )
