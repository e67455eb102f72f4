"""`spec` of an LLMDeployment: what is wanted. An absent field means that the planner chooses, and says why.

Bounds are the runtime's own (`millstream_runtime.config`), so that what the API server admits the runtime accepts.
A default that the planner applies is written in the description, not in the schema: then a later, better choice
needs no change of stored objects. `replicas` alone is defaulted by the server, because autoscalers read it there.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from millstream_operator.api.access import Auth, Network
from millstream_operator.api.base import ApiModel, Duration
from millstream_operator.api.model import Image, Model
from millstream_operator.api.monitoring import Monitoring
from millstream_operator.api.optimization import Parallelism, Quantization, Speculation
from millstream_operator.api.pod_template import PodTemplate
from millstream_operator.api.scaling import Autoscaling
from millstream_operator.api.workload import Budget, Objectives, Tier, Workload
from millstream_runtime.allowed_origins import MAX_ORIGIN_CHARACTERS, MAX_ORIGINS, ORIGIN_PATTERN
from millstream_runtime.config import MAX_MODEL_LEN_LIMIT_TOKENS, MAX_NUM_SEQS_LIMIT, DType


class AcceleratorType(StrEnum):
    GPU = "GPU"
    CPU = "CPU"


ProductName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", min_length=1, max_length=64)]


class Accelerator(ApiModel):
    """What the model runs on."""

    type: AcceleratorType | None = Field(None, description="GPU (NVIDIA) or CPU (small models, trials). Default: GPU.")
    products: (
        Annotated[
            list[ProductName],
            Field(min_length=1, max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
        ]
        | None
    ) = Field(
        None,
        description="GPUs that may be used, such as A100-80GB or the node label nvidia.com/gpu.product. Default: any "
        "that is free.",
    )


class Switch(StrEnum):
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class Engine(ApiModel):
    """Limits of the inference engine. Each one is a trade of memory against throughput."""

    max_model_len: int | None = Field(
        None,
        ge=1,
        le=MAX_MODEL_LEN_LIMIT_TOKENS,
        description="Tokens of prompt and answer together, at most; at least 2. The plan keeps room in the KV cache "
        "for four requests of this length: for one with parallelism.tensor, for one and four usual ones with a load in "
        "workload. Default: 8192; 16384 with profile RAG or Code, 4096 with Edge; at least twice inputTokens and "
        "outputTokens; at most what the model allows, and that where the GPUs are not known.",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=16,
        le=MAX_MODEL_LEN_LIMIT_TOKENS,
        description="Tokens that one step may compute. Default: by tier and workload, else 2048.",
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        le=MAX_NUM_SEQS_LIMIT,
        description="Requests that one step may hold. Default: by tier and workload, else 64.",
    )
    gpu_memory_utilization_percent: int | None = Field(
        None,
        ge=1,
        le=99,
        description="Share of the GPU's memory for weights and KV cache, in percent. Only with a GPU. Default: by "
        "workload, else 90.",
    )
    prefix_caching: Switch | None = Field(
        None, description="Share KV blocks among requests that begin alike, or not. Default: Enabled."
    )
    hybrid_kv_cache_manager: Switch | None = Field(
        None,
        description="Free the KV blocks behind the sliding windows of models that have full layers too (Gemma 2, 3) or "
        "keep all. Default: on a CPU what takes less memory; on a GPU, where it was not measured, Disabled.",
    )
    dtype: DType | None = Field(
        None,
        description="What a CPU holds weights in that no format quantizes. bfloat16 and float16 take half the memory "
        "of float32; activations and keys and values are float32 in any case. auto and absent: the checkpoint's own 16 "
        "bits, else float32. float32 is for exact numbers. Only on a CPU: a GPU computes in the checkpoint's dtype.",
    )


class Warmup(ApiModel):
    """How a replica gets ready, and stays fast while idle."""

    heartbeat_interval: Duration | None = Field(
        None,
        description="Idle time after which a replica runs one small step to stay warm, for example 30s. "
        "0s switches heartbeats off. A change restarts nothing. Default: 30s.",
    )
    timeout: Duration | None = Field(
        None,
        description="Time a pod has to load and warm up before it is restarted, for example 20m. Default: 20m.",
    )


class RolloutStrategy(StrEnum):
    AUTO = "Auto"
    AVAILABILITY = "Availability"
    RESOURCE_AWARE = "ResourceAware"


class OnInsufficientEvidence(StrEnum):
    PROCEED = "Proceed"
    HOLD = "Hold"


class Rollout(ApiModel):
    """How a change reaches the pods. A new revision that fails stops at its first pod."""

    strategy: RolloutStrategy | None = Field(
        None,
        description="Availability: one more pod comes up first, none that serves is taken away before. ResourceAware: "
        "one pod after another is drained and replaced in place, without a spare GPU; what fails is rolled back. Auto: "
        "Availability where there is a GPU for one more replica, else ResourceAware. Default: Auto.",
    )
    progress_deadline: Duration | None = Field(
        None,
        description="Time without progress after which a rollout is reported as failed, for example 30m. Longer than "
        "warmup.timeout. Bytes that move are progress. Default: warmup.timeout and 10m, and while a known model is "
        "downloaded, the time for it at 50 MB/s.",
    )
    drain_timeout: Duration | None = Field(
        None,
        description="Time a leaving pod has to finish running requests, for example 10m. Default: 10m.",
    )
    evidence_timeout: Duration | None = Field(
        None,
        description="Time that a stage of a shift of traffic waits for the evidence that it needs to end, for example "
        "1h. onInsufficientEvidence says what happens then. Default: 2h.",
    )
    on_insufficient_evidence: OnInsufficientEvidence | None = Field(
        None,
        description="What a stage of a shift of traffic does that lacks evidence after evidenceTimeout. Proceed: it "
        "goes on, and says so. Hold: new and old pods serve on until it has the evidence. Default: Proceed.",
    )
    retry: Annotated[str, StringConstraints(min_length=1, max_length=63)] | None = Field(
        None,
        description="Any text, for example the date. Another value than before tries a revision once more that was "
        "rolled back; it changes nothing else and restarts no pod.",
    )


class UpdatePolicy(StrEnum):
    PINNED = "Pinned"
    FOLLOW_OPERATOR = "FollowOperator"


class LogLevel(StrEnum):
    DEBUG = "Debug"
    INFO = "Info"
    WARNING = "Warning"
    ERROR = "Error"


class Runtime(ApiModel):
    """The runtime container."""

    image: Image | None = Field(
        None, description="Image of the runtime. Default: the operator's own, kept until the spec next changes."
    )
    update_policy: UpdatePolicy | None = Field(
        None,
        description="When a better plan or other defaults of the operator are taken over. Pinned: when the spec next "
        "changes. FollowOperator: at once, by a rollout. Default: Pinned.",
    )
    log_level: LogLevel | None = Field(
        None, description="How much the runtime logs; a change restarts nothing. Default: Info."
    )


class ServiceType(StrEnum):
    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


Origin = Annotated[str, StringConstraints(pattern=ORIGIN_PATTERN, min_length=1, max_length=MAX_ORIGIN_CHARACTERS)]


class Service(ApiModel):
    """The Service in front of the replicas, named after the LLMDeployment."""

    type: ServiceType | None = Field(None, description="ClusterIP, NodePort or LoadBalancer. Default: ClusterIP.")
    port: int | None = Field(None, ge=1, le=65535, description="Port of the Service. Default: 80.")
    allowed_origins: (
        Annotated[
            list[Origin],
            Field(min_length=1, max_length=MAX_ORIGINS, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
        ]
        | None
    ) = Field(
        None,
        description="Origins of web pages that may ask from a browser (CORS): scheme://host or scheme://host:port in "
        'lower case, without a path, such as https://chat.example.com; "*": every page. A request needs its API key '
        "all the same. A change restarts nothing. Default: none.",
    )


class LLMDeploymentSpec(ApiModel):
    """What is wanted. An absent field means that the operator chooses and explains it in status.plan."""

    tier: Tier | None = Field(
        None,
        description="Startup, Mid or Enterprise: sets defaults of the batch, of speculation and of quantization. "
        "Default: none of them, and a small batch.",
    )
    workload: Workload | None = Field(None, description="The requests to expect.")
    model: Model = Field(description="The model to serve.")
    accelerator: Accelerator | None = Field(None, description="What the model runs on. Default: GPUs.")
    parallelism: Parallelism | None = Field(None, description="GPUs of one replica.")
    quantization: Quantization | None = Field(None, description="Formats of weights and KV cache.")
    engine: Engine | None = Field(None, description="Limits of the inference engine.")
    speculation: Speculation | None = Field(None, description="Tokens proposed cheaply and checked in one step.")
    objectives: Objectives | None = Field(None, description="What is promised to users.")
    budget: Budget | None = Field(None, description="What the GPUs may cost.")
    warmup: Warmup | None = Field(None, description="How a replica gets ready, and stays fast while idle.")
    rollout: Rollout | None = Field(None, description="How a change reaches the pods.")
    replicas: int = Field(
        1, ge=0, le=1000, description="Identical replicas behind the Service. 0 stops serving. Default: 1."
    )
    autoscaling: Autoscaling | None = Field(None, description="Replicas by load. Default: replicas stays as it is.")
    runtime: Runtime | None = Field(None, description="The runtime container.")
    service: Service | None = Field(None, description="The Service in front of the replicas.")
    auth: Auth | None = Field(None, description="Who may ask the model. Default: everyone who reaches the Service.")
    network: Network | None = Field(None, description="Which connections the pods may have. Default: the chart's.")
    monitoring: Monitoring | None = Field(None, description="Scraping and alerts by the Prometheus operator.")
    pod_template: PodTemplate | None = Field(
        None, description="Changes to the pods: labels, scheduling, environment, resources."
    )
