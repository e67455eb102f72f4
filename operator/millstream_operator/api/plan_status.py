"""`status.plan`: what the operator chose and why, in exactly the words of `millstream plan -o json`.

Only summary, reasons and the hash are always there: an infeasible spec has no GPUs to name, and a plan that an older
operator pinned has no ledger.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue, StringConstraints

from millstream_operator.api.base import ApiModel

Text = Annotated[str, StringConstraints(max_length=1024)]
Name = Annotated[str, StringConstraints(max_length=128)]
Summary = Annotated[str, StringConstraints(max_length=256)]
_ATOMIC: dict[str, JsonValue] = {"x-kubernetes-list-type": "atomic"}


class PlanReason(ApiModel):
    """Why one field of the plan has its value."""

    field: Name = Field(description="The plan's field, for example engine.maxNumSeqs.")
    reason: Text = Field(description="Why it has its value.")


class RejectedPlan(ApiModel):
    """An alternative that was looked at."""

    summary: Summary = Field(description="The alternative in a few words.")
    gpus_per_replica: int | None = Field(None, ge=1, description="GPUs that one replica would take.")
    monthly_usd: int | None = Field(None, ge=0, alias="monthlyUSD", description="What it would cost.")
    ttft_milliseconds: int | None = Field(None, ge=0, description="Predicted time to the first token.")
    itl_microseconds: int | None = Field(None, ge=0, description="Predicted time between tokens.")
    reason: Text = Field(description="The one reason against it.")


class PlanFix(ApiModel):
    """A change with which the spec is applied; it was planned again with it."""

    field: Name = Field(
        description="What to change: fields of the spec, or gpus, for nodes to add to the cluster, or both."
    )
    value: Name = Field(description="What to change it to. Of gpus: the GPUs of one added node, or of several.")
    summary: Summary = Field(description="The plan that this gives.")
    patch: Annotated[str, StringConstraints(max_length=4096)] | None = Field(
        None, description="The edit of the spec, for kubectl patch --type merge -p. Absent: the spec stays as it is."
    )


class EngineStatus(ApiModel):
    max_model_len: int | None = Field(
        None, ge=1, description="Tokens of prompt and answer together. Absent: what the model allows."
    )
    max_num_batched_tokens: int = Field(ge=1, description="Tokens that one step may compute.")
    max_num_seqs: int = Field(ge=1, description="Requests that one step may hold.")
    gpu_memory_utilization_percent: int | None = Field(
        None, ge=1, le=99, description="Share of the GPU's memory in use. Absent on a CPU."
    )
    prefix_caching: Name | None = Field(None, description="Enabled: KV blocks are shared among requests.")
    hybrid_kv_cache_manager: Name | None = Field(
        None, description="Enabled: KV blocks behind sliding windows are freed. Absent: the spec does not say."
    )
    dtype: Name | None = Field(
        None, description="What a CPU holds weights in, as engine.dtype asks. Absent: the spec does not say."
    )


class SpeculationStatus(ApiModel):
    method: Name = Field(description="Who proposes tokens. Disabled: none are proposed.")
    max_draft_tokens: int | None = Field(None, ge=1, description="Tokens proposed at a time, at most.")
    assumed_acceptance_percent: int | None = Field(
        None, ge=0, le=100, description="Share of accepted tokens that predictions assume; not a measurement."
    )
    most_speedup_percent: int | None = Field(
        None,
        ge=0,
        description="On a CPU: tokens per second of one request over those without drafts, at most, if that share is "
        "accepted. 139: 1.39 times.",
    )
    acceptance: Name | None = Field(None, description="The rule by which drafts stand. Absent: Identity.")


class MemoryStatus(ApiModel):
    """The ledger of one GPU (or container): the parts add up to usableBytes."""

    usable_bytes: int = Field(ge=0, description="What the device has.")
    weights_bytes: int = Field(ge=0, description="Weights of the layers, scales of their groups included.")
    embeddings_bytes: int = Field(ge=0, description="Token table and output head.")
    draft_weights_bytes: int = Field(ge=0, description="Weights of the draft model or head.")
    activations_bytes: int = Field(ge=0, description="Peak of the largest step.")
    graphs_bytes: int = Field(ge=0, description="CUDA graphs.")
    nccl_bytes: int = Field(ge=0, description="Buffers between GPUs.")
    context_bytes: int = Field(ge=0, description="CUDA context and libraries.")
    kv_cache_bytes: int = Field(ge=0, description="What is left for keys and values.")
    headroom_bytes: int = Field(ge=0, description="What gpuMemoryUtilizationPercent leaves alone.")


class StepCorrection(ApiModel):
    """Measured over predicted step times, in thousandths. Absent: none was measured."""

    decode_permille: int | None = Field(None, ge=1, description="A decode step of one request.")
    batch_permille: int | None = Field(None, ge=1, description="A decode step of batchSequences requests.")
    prefill_permille: int | None = Field(None, ge=1, description="A prompt up to its first token.")
    batch_sequences: int | None = Field(None, ge=1, description="Requests of the batch that was measured.")


class PlanCorrection(StepCorrection):
    """Measured over predicted, in thousandths, of one placement of this model with this image."""

    accelerator: Name = Field(description="The GPU's name.")
    tensor_parallel_size: int = Field(ge=1, description="GPUs that share each layer.")
    quantization: Name = Field(description="Method of the weights.")
    weights_permille: int = Field(ge=1, description="All weights.")
    activations_permille: int = Field(ge=1, description="Peak of the largest step.")
    graphs_permille: int = Field(ge=1, description="CUDA graphs.")
    other_permille: int = Field(ge=1, description="Context, libraries and buffers between GPUs.")


class PredictionStatus(ApiModel):
    """Predicted from the roofline, of one replica. Not measured."""

    kv_cache_tokens: int = Field(ge=0, description="Tokens that the KV cache holds.")
    concurrent_sequences: int = Field(ge=0, description="Requests of usual length at the same time.")
    ttft_milliseconds: int = Field(ge=0, description="Time to the first token of a usual prompt, without queueing.")
    itl_microseconds: int = Field(ge=0, description="Time between tokens with that many requests running.")
    single_stream_tokens_per_second: int = Field(ge=0, description="Output of one request alone.")
    tokens_per_second: int = Field(ge=0, description="Output of all requests together.")
    requests_per_minute: int = Field(ge=0, description="Requests of usual length that it can finish.")


class CostStatus(ApiModel):
    """At the catalogue's list prices, of all replicas."""

    hourly_milli_usd: int = Field(ge=0, alias="hourlyMilliUSD", description="Thousandths of a dollar an hour.")
    monthly_usd: int = Field(ge=0, alias="monthlyUSD", description="Dollars in 730 hours.")
    per_million_tokens_milli_usd: int | None = Field(
        None,
        ge=0,
        alias="perMillionTokensMilliUSD",
        description="Thousandths of a dollar for a million output tokens of a saturated replica.",
    )


class PlanStatus(ApiModel):
    """What the operator chose, and why. Kept until the spec changes."""

    summary: Summary = Field(description="The plan in a few words, for example 2×A100-40GB TP2 AWQ.")
    preferred: Summary | None = Field(
        None, description="What would have been chosen if no GPU was taken. Absent: this plan."
    )
    feasible: bool | None = Field(None, description="False: there is no plan; reasons say why and fixes what helps.")
    accelerator: Name | None = Field(None, description="The GPU's name, or GPU where any will do, or CPU.")
    gpus_per_replica: int | None = Field(None, ge=0, description="GPUs that one replica takes.")
    tensor_parallel_size: int | None = Field(None, ge=1, description="GPUs that share each layer of the model.")
    pipeline_parallel_size: int | None = Field(None, ge=1, description="Groups of GPUs that share the layers.")
    replicas: int | None = Field(None, ge=0, description="Replicas that are wanted. cost is that of all of them.")
    replicas_for_load: int | None = Field(
        None, ge=1, description="Replicas that the load of workload is predicted to need. Absent: no load is given."
    )
    quantization: Name | None = Field(None, description="Method of the weights. None: as they are in the checkpoint.")
    kv_cache: Name | None = Field(None, description="Format of keys and values. None: 16 bit.")
    engine: EngineStatus | None = Field(None, description="Limits of the inference engine, resolved.")
    speculation: SpeculationStatus | None = Field(None, description="Who proposes tokens.")
    memory: MemoryStatus | None = Field(None, description="Where the bytes of one GPU go.")
    calibration: Annotated[list[PlanCorrection], Field(max_length=16)] | None = Field(
        None,
        description="Corrections by measurements that the plan was made with; it keeps them. Absent: none was known.",
        json_schema_extra=_ATOMIC,
    )
    predicted: PredictionStatus | None = Field(None, description="Latency and throughput, predicted.")
    cost: CostStatus | None = Field(None, description="What it costs.")
    requires: Annotated[list[Name], Field(max_length=32)] | None = Field(
        None, description="What the runtime lacks for this plan. Empty: it can be applied.", json_schema_extra=_ATOMIC
    )
    reasons: Annotated[list[PlanReason], Field(max_length=64)] = Field(
        description="Why each choice was made.", json_schema_extra=_ATOMIC
    )
    rejected: Annotated[list[RejectedPlan], Field(max_length=32)] | None = Field(
        None, description="Alternatives, each with the one reason against it.", json_schema_extra=_ATOMIC
    )
    fixes: Annotated[list[PlanFix], Field(max_length=8)] | None = Field(
        None,
        description="Nearest changes with which the spec is applied: edits, then nodes to add.",
        json_schema_extra=_ATOMIC,
    )
    input_hash: Annotated[str, StringConstraints(max_length=64)] = Field(
        description="Hash of the part of the spec that decides about the pods: the same hash, the same plan."
    )
    facts_hash: Annotated[str, StringConstraints(max_length=64)] | None = Field(
        None,
        description="Hash of what it was made from other than the spec: the cluster's GPUs, prices, the model's shape.",
    )
