"""`status` of an LLMDeployment: what is, written by the operator alone and only when something changed.

No timestamps besides a condition's own transition, no counters and no latencies: a varying status would wake the
operator that wrote it, for ever.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from millstream_operator.api.base import ApiModel
from millstream_operator.api.plan_status import PlanStatus, StepCorrection


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """One observation, in the shape of metav1.Condition."""

    type: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z]*$", min_length=1, max_length=64)] = Field(
        description="What is observed: Ready is the summary."
    )
    status: ConditionStatus = Field(description="True, False or Unknown.")
    reason: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z0-9]*$", min_length=1, max_length=128)] = Field(
        description="A stable CamelCase word for machines; docs/reasons.md lists each with its cause and fix."
    )
    message: Annotated[str, StringConstraints(max_length=4096)] = Field(
        description="One sentence for people: what is wrong and what to do about it."
    )
    observed_generation: int = Field(ge=0, description="The metadata.generation that this was observed for.")
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"}, max_length=64)] = Field(
        description="When the status last changed, in UTC."
    )


class ModelStatus(ApiModel):
    served_name: Annotated[str, StringConstraints(max_length=253)] = Field(description="Name of the model in requests.")
    resolved_revision: Annotated[str, StringConstraints(max_length=128)] | None = Field(
        None, description="Commit or image digest that all pods load, where the source has one."
    )
    resolved_draft_revision: Annotated[str, StringConstraints(max_length=128)] | None = Field(
        None, description="Commit or image digest of the draft model or head, where its source has one."
    )


class RuntimeStatus(ApiModel):
    image: Annotated[str, StringConstraints(max_length=512)] = Field(description="Image that the plan is pinned to.")


class AppliedStrategy(StrEnum):
    """What `spec.rollout.strategy` came to."""

    AVAILABILITY = "Availability"
    RESOURCE_AWARE = "ResourceAware"


class RolloutPhase(StrEnum):
    PROGRESSING = "Progressing"
    BLOCKED = "Blocked"
    STOPPED = "Stopped"
    ROLLED_BACK = "RolledBack"
    COMPLETE = "Complete"


class RolloutStatus(ApiModel):
    """Revisions are ControllerRevisions: `kubectl get controllerrevisions -l millstream.dev/deployment=NAME`."""

    current_revision: Annotated[str, StringConstraints(max_length=63)] | None = Field(
        None, description="The last revision that answered through the Service."
    )
    update_revision: Annotated[str, StringConstraints(max_length=63)] | None = Field(
        None, description="The revision that the spec asks for."
    )
    strategy: AppliedStrategy | None = Field(
        None, description="How the update revision reaches the pods: what spec.rollout.strategy came to."
    )
    phase: RolloutPhase | None = Field(
        None,
        description="Progressing; Blocked: it waits for GPUs, and no pod is drained for it (condition RolloutBlocked); "
        "Stopped: the update revision fails and the older pods serve on; RolledBack: it "
        "failed, and the current revision runs again; Complete.",
    )
    available_replicas: int | None = Field(None, ge=0, description="Available pods of the update revision.")
    evidence: Annotated[str, StringConstraints(max_length=512)] | None = Field(
        None,
        description="While traffic shifts in stages: the stage, and how much of the evidence it has that it needs.",
    )


class DecisionStatus(ApiModel):
    """One decision."""

    time: Annotated[str, Field(json_schema_extra={"format": "date-time"}, max_length=64)] = Field(
        description="When it was decided, in UTC."
    )
    type: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z0-9]*$", min_length=1, max_length=64)] = Field(
        description="A stable CamelCase word; docs/reasons.md lists each."
    )
    message: Annotated[str, StringConstraints(max_length=1024)] = Field(description="What was decided, and why.")


class WarmupStatus(ApiModel):
    """How far the slowest pod has come. The phases are a growing list: read them, do not depend on them."""

    phase: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z]*$", min_length=1, max_length=63)] | None = Field(
        None,
        description="Scheduling, Downloading, Starting, LoadingWeights, SizingKVCache, WarmingUp, Ready. Absent: "
        "nothing is wanted.",
    )
    estimated_ready_time: Annotated[str, Field(json_schema_extra={"format": "date-time"}, max_length=64)] | None = (
        Field(
            None,
            description="When the last replica is expected to be ready, in UTC. Rewritten only when it moves by more "
            "than a fifth of what remains.",
        )
    )
    seconds: int | None = Field(
        None, ge=0, description="What the last warm-up took, from the start of the process to Ready."
    )


class MemoryUse(ApiModel):
    """Bytes of one GPU (or container)."""

    weights_bytes: int | None = Field(None, ge=0, description="All weights, embeddings and draft included.")
    activations_bytes: int | None = Field(None, ge=0, description="Peak of the largest step.")
    graphs_bytes: int | None = Field(None, ge=0, description="CUDA graphs.")
    kv_cache_bytes: int | None = Field(None, ge=0, description="The KV cache.")
    kv_cache_tokens: int | None = Field(None, ge=0, description="Tokens that the KV cache holds.")
    draft_kv_cache_bytes: int | None = Field(
        None,
        ge=0,
        description="The KV cache of a draft model or head, measured. In a prediction kvCacheBytes has both.",
    )


class MemoryCorrection(ApiModel):
    """Measured over predicted bytes of earlier pods, in thousandths: what `predicted` was multiplied with."""

    weights_permille: int = Field(ge=1, description="All weights.")
    activations_permille: int = Field(ge=1, description="Peak of the largest step.")
    graphs_permille: int = Field(ge=1, description="CUDA graphs.")
    other_permille: int = Field(ge=1, description="Context, libraries and buffers between GPUs.")


class MemoryComparison(ApiModel):
    """The plan's numbers beside the runtime's own."""

    predicted: MemoryUse | None = Field(None, description="By the plan. Absent: it knew too little of model or device.")
    measured: MemoryUse | None = Field(None, description="By the runtime, once a revision. Absent: it did not report.")
    correction: MemoryCorrection | None = Field(
        None, description="What the prediction was corrected by. Absent: nothing was measured when the plan was made."
    )
    ignored: (
        Annotated[
            list[Annotated[str, StringConstraints(max_length=256)]],
            Field(max_length=4, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
        ]
        | None
    ) = Field(None, description="Measured values that cannot be true and correct no plan, each with the reason.")


class StepTimes(ApiModel):
    """Times of the steps that the runtime measures at the end of its warm-up."""

    decode_microseconds: int | None = Field(None, ge=0, description="A decode step of one request.")
    batch_microseconds: int | None = Field(None, ge=0, description="A decode step of batchSequences requests.")
    batch_sequences: int | None = Field(None, ge=0, description="Requests of that batch.")
    prefill_microseconds: int | None = Field(None, ge=0, description="A prompt of prefillTokens up to its first token.")
    prefill_tokens: int | None = Field(None, ge=0, description="Tokens of that prompt.")


class StepComparison(ApiModel):
    """The plan's step times beside the runtime's own."""

    predicted: StepTimes | None = Field(None, description="For the same steps, corrected. Absent: on a CPU.")
    measured: StepTimes | None = Field(None, description="By one pod of the revision.")
    correction: StepCorrection | None = Field(
        None, description="What the plan's predictions were corrected by. Absent: nothing was measured before."
    )


class DraftingState(StrEnum):
    DRAFTING = "Drafting"
    NOT_DRAFTING = "NotDrafting"


MOST_FAILED_PODS = 16  # named in status.speculation


class MeasuredSpeculation(ApiModel):
    """What drafts do in the pods, smoothed over minutes, beside what the plan expects of them."""

    revision: Annotated[str, StringConstraints(max_length=63)] = Field(
        description="Revision of the pods that were asked."
    )
    state: DraftingState = Field(
        description="Drafting: most decodes that could draft did. NotDrafting: most did not, because the governor "
        "expects no gain or the drafter failed."
    )
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"}, max_length=64)] = Field(
        description="When the state last changed, in UTC."
    )
    accepted_percent: int | None = Field(
        None, ge=0, le=100, description="Measured share of checked drafts that stood. Rewritten when it moves by 10."
    )
    assumed_acceptance_percent: int | None = Field(None, ge=0, le=100, description="The share that the plan assumes.")
    most_speedup_percent: int | None = Field(
        None, ge=0, description="What one request gains at most by the plan, if the assumed share is accepted."
    )
    failed_pods: (
        Annotated[
            list[Annotated[str, StringConstraints(max_length=253)]],
            Field(max_length=MOST_FAILED_PODS, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
        ]
        | None
    ) = Field(None, description="Pods that draft no more, since their drafter failed. Absent: none of those asked.")


class ManagerStatus(ApiModel):
    """A release of the operator, by its Lease."""

    namespace: Annotated[str, StringConstraints(min_length=1, max_length=63)] = Field(
        description="Of the release and its Lease."
    )
    name: Annotated[str, StringConstraints(min_length=1, max_length=253)] = Field(description="Of its Lease.")


class LLMDeploymentStatus(ApiModel):
    """What is. Written by the operator."""

    observed_generation: int | None = Field(
        None, ge=-1, description="The metadata.generation that this status was made for. -1: none yet."
    )
    managed_by: ManagerStatus | None = Field(
        None,
        description="The release that writes this object and its children. Another one takes over when this Lease is "
        "absent or was not renewed for 10 minutes, or when this field is removed.",
    )
    conditions: Annotated[list[Condition], Field(max_length=32)] | None = Field(
        None,
        description="Ready is the summary; Planned, PodsScheduled, WarmedUp, ModelReady and Available are its parts; "
        "Reconciling, Stalled and others that report a problem are there only while true.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    replicas: int | None = Field(None, ge=0, description="Pods that exist.")
    ready_replicas: int | None = Field(None, ge=0, description="Pods that are ready, of any revision.")
    updated_replicas: int | None = Field(None, ge=0, description="Pods of the update revision.")
    available_replicas: int | None = Field(None, ge=0, description="Pods that are available, of any revision.")
    selector: Annotated[str, StringConstraints(max_length=512)] | None = Field(
        None, description="Label selector of the pods, for autoscalers."
    )
    url: Annotated[str, StringConstraints(max_length=512)] | None = Field(
        None, description="Where the model answers, inside the cluster."
    )
    model: ModelStatus | None = Field(None, description="The model as it is served.")
    plan: PlanStatus | None = Field(None, description="What the operator chose, and why.")
    step_times: StepComparison | None = Field(None, description="Predicted and measured times of steps.")
    memory: MemoryComparison | None = Field(None, description="Predicted and measured memory.")
    speculation: MeasuredSpeculation | None = Field(
        None, description="Whether the pods draft, and how many drafts stand. Absent: they do not speculate."
    )
    warmup: WarmupStatus | None = Field(None, description="How far the slowest pod has come.")
    runtime: RuntimeStatus | None = Field(None, description="The runtime that is pinned.")
    rollout: RolloutStatus | None = Field(None, description="Which revision serves, and which is wanted.")
    decisions: Annotated[list[DecisionStatus], Field(max_length=20)] | None = Field(
        None,
        description="What the operator decided by itself, newest first: at most 20 entries.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
