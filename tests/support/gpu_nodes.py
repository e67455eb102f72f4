"""Nodes with GPUs and pods that hold some, as the API server has them, for tests of planning in a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Manifest = dict[str, Any]
L4, T4, A100 = "NVIDIA-L4", "Tesla-T4", "NVIDIA-A100-SXM4-80GB"
A100_40 = "NVIDIA-A100-SXM4-40GB"
MODEL = "meta-llama/Llama-3.2-1B-Instruct"  # any of these GPUs holds it


def gpu_node(
    name: str, product: str = L4, gpus: int = 1, labels: Mapping[str, str] | None = None, **spec: Any
) -> Manifest:
    """A node as GPU feature discovery labels it; `spec`: unschedulable, taints."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "namespace": "", "labels": {"nvidia.com/gpu.product": product, **(labels or {})}},
        "spec": spec,
        "status": {
            "allocatable": {"nvidia.com/gpu": str(gpus)},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def gpu_pod(name: str, node: str, gpus: int = 1, **labels: str) -> Manifest:
    """A pod of somebody else, bound to a node."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "team", "labels": labels},
        "spec": {"nodeName": node, "containers": [{"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]},
        "status": {"phase": "Running"},
    }


def spec_on_gpu(**spec: Any) -> Manifest:
    """Fields of a spec that serves the model on a GPU."""
    return {"model": {"source": {"huggingFace": {"repository": MODEL}}}, "accelerator": {"type": "GPU"}} | spec
