"""What a plan holds: every value that the spec left open, resolved, with the reason for each choice.

A plan is made once for each version of the spec that decides about the pods, and pinned with what was rendered
from it (`reconciling/revisions.py`), so it must survive a restart: it is plain data, and `status_plan` is its JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.api.spec import AcceleratorType

GPU_RESOURCE = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a field of the plan has its value."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Engine limits. `None`: the runtime chooses, because it alone sees the checkpoint or the GPU."""

    max_model_len_tokens: int | None
    max_num_batched_tokens: int
    max_num_seqs: int
    gpu_memory_utilization_percent: int | None


@dataclass(frozen=True, slots=True)
class ResourcePlan:
    """Resources of one pod, as Kubernetes quantities by resource name."""

    requests: Mapping[str, str]
    limits: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PlanDefaults:
    """What the operator's own configuration contributes to a plan."""

    runtime_image: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """One LLMDeployment, resolved."""

    summary: str
    accelerator: AcceleratorType
    gpus_per_replica: int
    tensor_parallel_size: int
    quantization: str
    model_path: str  # relative to the model root, or absolute
    served_name: str
    engine: EnginePlan
    heartbeat_interval_seconds: int
    warmup_timeout_seconds: int
    drain_timeout_seconds: int
    runtime_image: str
    resources: ResourcePlan
    input_hash: str
    reasons: tuple[Reason, ...] = field(default=())

    def status_plan(self) -> dict[str, Any]:
        """`status.plan`: what `millstream plan -o json` prints too."""
        engine = {
            "maxModelLen": self.engine.max_model_len_tokens,
            "maxNumBatchedTokens": self.engine.max_num_batched_tokens,
            "maxNumSeqs": self.engine.max_num_seqs,
            "gpuMemoryUtilizationPercent": self.engine.gpu_memory_utilization_percent,
        }
        return {
            "summary": self.summary,
            "accelerator": self.accelerator.value,
            "gpusPerReplica": self.gpus_per_replica,
            "tensorParallelSize": self.tensor_parallel_size,
            "quantization": self.quantization,
            "engine": {name: value for name, value in engine.items() if value is not None},
            "reasons": [{"field": reason.field, "reason": reason.reason} for reason in self.reasons],
            "inputHash": self.input_hash,
        }
