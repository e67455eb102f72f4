"""What a plan holds: every value that the spec left open, resolved, with the reason for each choice.

A plan is made once for each version of the spec that decides about the pods, and pinned with what was rendered
from it (`rollout/revisions.py`), so it must survive a restart: it is plain data, and `status_plan` is its JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.api.model import ObjectKey
from millstream_operator.api.spec import AcceleratorType
from millstream_operator.planning.calibration import NO_CALIBRATION, Calibration
from millstream_operator.planning.sizing.cost import Cost
from millstream_operator.planning.sizing.memory_ledger import MemoryLedger
from millstream_operator.planning.sizing.roofline import Prediction

GPU_RESOURCE = "nvidia.com/gpu"
GPUS_FIELD = "gpus"  # of a fix: nodes to add to the cluster
MAX_REJECTED = 24
MAX_EDITS, MAX_GPU_FIXES = 3, 3
MAX_FIXES = MAX_EDITS + MAX_GPU_FIXES


@dataclass(frozen=True, slots=True)
class PlanReason:
    """Why a field of the plan has its value."""

    field: str
    reason: str

    def as_dict(self) -> dict[str, str]:
        return {"field": self.field, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Engine limits. `None`: the runtime chooses, because it alone sees the checkpoint or the GPU."""

    max_model_len_tokens: int | None
    max_num_batched_tokens: int
    max_num_seqs: int
    gpu_memory_utilization_percent: int | None
    prefix_caching: bool = True
    hybrid_kv_cache_manager: bool | None = None
    dtype: str | None = None  # as `spec.engine.dtype` asks

    def as_dict(self) -> dict[str, int | str]:
        engine = {
            "maxModelLen": self.max_model_len_tokens,
            "maxNumBatchedTokens": self.max_num_batched_tokens,
            "maxNumSeqs": self.max_num_seqs,
            "gpuMemoryUtilizationPercent": self.gpu_memory_utilization_percent,
            "prefixCaching": "Enabled" if self.prefix_caching else "Disabled",
            "hybridKvCacheManager": {True: "Enabled", False: "Disabled", None: None}[self.hybrid_kv_cache_manager],
            "dtype": self.dtype,
        }
        return {name: value for name, value in engine.items() if value is not None}


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """How tokens are proposed. `assumed_acceptance_percent` is assumed by predictions, not measured.

    `most_speedup_percent`: what one request gains at most (`draft_gain`). None: a GPU's predictions have it, or a shape
    is not known.
    """

    method: str = "Disabled"
    max_draft_tokens: int = 0
    assumed_acceptance_percent: int = 0
    most_speedup_percent: int | None = None
    acceptance: str = "Identity"  # the rule by which drafts stand; plans that were stored before have no other

    def as_dict(self) -> dict[str, Any]:
        if self.method == "Disabled":
            return {"method": self.method}
        most = {"mostSpeedupPercent": self.most_speedup_percent} if self.most_speedup_percent is not None else {}
        rule = {"acceptance": self.acceptance} if self.acceptance != "Identity" else {}
        return (
            {
                "method": self.method,
                "maxDraftTokens": self.max_draft_tokens,
                "assumedAcceptancePercent": self.assumed_acceptance_percent,
            }
            | most
            | rule
        )


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
class Rejected:
    """An alternative that was looked at, and the one reason against it. 0 GPUs: an option, not a placement."""

    summary: str
    reason: str
    gpus_per_replica: int = 0
    monthly_usd: int | None = None
    ttft_milliseconds: int | None = None
    itl_microseconds: int | None = None

    def as_dict(self) -> dict[str, Any]:
        found = {
            "summary": self.summary,
            "gpusPerReplica": self.gpus_per_replica or None,
            "monthlyUSD": self.monthly_usd,
            "ttftMilliseconds": self.ttft_milliseconds,
            "itlMicroseconds": self.itl_microseconds,
            "reason": self.reason,
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Fix:
    """A change with which the spec is applied; `summary` is the plan that was made with it.

    `patch`: the edit of the spec as a JSON merge patch. None: the spec stays, and the cluster needs other nodes.
    """

    field: str
    value: str
    summary: str
    patch: str | None = None

    @property
    def adds_nodes(self) -> bool:
        """Whether the cluster needs other nodes for it."""
        return self.field.split(",")[0] == GPUS_FIELD

    def as_dict(self) -> dict[str, str]:
        found = {"field": self.field, "value": self.value, "summary": self.summary, "patch": self.patch}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """The draft model's files. `path`, `revision` and `checkpoint_bytes` as those of the model in `Plan`.

    `tuned`: key of the tuning that made them of that revision; None: they are the source's own.
    """

    path: str
    revision: str | None = None
    checkpoint_bytes: int | None = None
    tuned: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One LLMDeployment, resolved. `memory`, `predicted` and `cost` are there when model and GPU are known."""

    summary: str
    accelerator: AcceleratorType
    gpus_per_replica: int
    tensor_parallel_size: int
    quantization: str
    model_path: str  # relative to the model root, or absolute
    served_name: str
    engine: EnginePlan
    warmup_timeout_seconds: int
    drain_timeout_seconds: int
    runtime_image: str
    resources: ResourcePlan
    input_hash: str
    reasons: tuple[PlanReason, ...] = field(default=())
    product: str | None = None  # the catalogue's name of the GPU; None: any, or a CPU
    product_labels: tuple[str, ...] = ()  # values of nvidia.com/gpu.product that the pods may run on; empty: any
    pipeline_parallel_size: int = 1
    replicas: int | None = None  # None: the spec's, which may be scaled without a new plan
    replicas_for_load: int | None = None  # set where the plan is shown (`scaling_cost.py`), never where it is pinned
    kv_cache: str = "None"
    asked_quantization: str | None = None  # of a checkpoint that was not inspected, or is rounded while it is loaded
    dtype: str | None = None  # of what is not quantised, for people alone: it is not stored. None: not known
    # Tokens of one request that the KV pool must have room for, or a pod ends its boot. None: the runtime decides.
    planned_model_len_tokens: int | None = None
    speculation: SpeculationPlan = field(default_factory=SpeculationPlan)
    memory: MemoryLedger | None = None
    predicted: Prediction | None = None
    cost: Cost | None = None
    requires: tuple[str, ...] = ()  # what the runtime or the operator lacks for it; empty: it can be applied
    rejected: tuple[Rejected, ...] = ()
    waits: bool = False  # its GPUs exist, and are taken
    preferred: str | None = None  # what would have been chosen if none was taken; None: this plan
    facts_hash: str | None = None  # of the facts that it was made from
    model_revision: str | None = None  # what every pod of this plan downloads; None: the spec's own words
    checkpoint_bytes: int | None = None  # what a download weighs; None: not known
    api_keys: ObjectKey | None = None  # the Secret with the API keys that a request needs one of; None: it needs none
    draft: DraftFiles | None = None  # None: no draft model
    calibration: Calibration = NO_CALIBRATION  # the corrections that it was made with, of all placements

    @property
    def feasible(self) -> bool:
        return True

    def status_plan(self) -> dict[str, Any]:
        """`status.plan`: what `millstream plan -o json` prints too."""
        found = {
            "summary": self.summary,
            "preferred": self.preferred,
            "feasible": True,
            "accelerator": self.product or self.accelerator.value,
            "gpusPerReplica": self.gpus_per_replica,
            "tensorParallelSize": self.tensor_parallel_size,
            "pipelineParallelSize": self.pipeline_parallel_size,
            "replicas": self.replicas,
            "replicasForLoad": self.replicas_for_load,
            "quantization": self.quantization,
            "kvCache": self.kv_cache,
            "engine": self.engine.as_dict(),
            "speculation": self.speculation.as_dict(),
            "memory": self.memory.as_dict() if self.memory else None,
            "calibration": self.calibration.as_list() or None,
            "predicted": self.predicted.as_dict() if self.predicted else None,
            "cost": self.cost.as_dict() if self.cost else None,
            "requires": [*self.requires],
            "reasons": [reason.as_dict() for reason in self.reasons],
            "rejected": [rejected.as_dict() for rejected in self.rejected[:MAX_REJECTED]],
            "fixes": [],
            "inputHash": self.input_hash,
            "factsHash": self.facts_hash,
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No plan exists. `constraint` names what binds, `message` says by how much."""

    constraint: (
        str  # memory | parallelism | quantization | speculation | products | inventory | latency | load | budget
    )
    message: str
    input_hash: str
    rejected: tuple[Rejected, ...] = ()
    fixes: tuple[Fix, ...] = ()
    requires: tuple[str, ...] = ()  # what the runtime lacks even where all else is changed

    @property
    def feasible(self) -> bool:
        return False

    @property
    def summary(self) -> str:
        return f"Infeasible: {self.constraint}"

    def status_plan(self) -> dict[str, Any]:
        """`status.plan`, without the parts that only a plan has."""
        return {
            "summary": self.summary,
            "feasible": False,
            "requires": [*self.requires],
            "reasons": [{"field": self.constraint, "reason": self.message}],
            "rejected": [rejected.as_dict() for rejected in self.rejected[:MAX_REJECTED]],
            "fixes": [fix.as_dict() for fix in self.fixes[:MAX_FIXES]],
            "inputHash": self.input_hash,
        }
