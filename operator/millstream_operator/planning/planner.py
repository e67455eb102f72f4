"""`plan(deployment, defaults) -> Plan`: every value that the spec leaves open, by simple rules that are written down.

The same function serves the operator and `millstream serve FILE` on a laptop, so it may look at its arguments and
at nothing else: no cluster, no files, no clock. The memory ledger and automatic parallelism come with the catalogue
of GPUs; until then a replica is one pod with one GPU, or a CPU.
"""

from __future__ import annotations

from millstream_operator.api import duration
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.rules import DEFAULT_WARMUP_TIMEOUT
from millstream_operator.api.spec import Accelerator, AcceleratorType, Engine, LLMDeploymentSpec, Rollout, Warmup
from millstream_operator.planning.input_hash import input_hash
from millstream_operator.planning.plan import GPU_RESOURCE, EnginePlan, Plan, PlanDefaults, Reason, ResourcePlan

DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_GPU_MEMORY_UTILIZATION_PERCENT = 90
DEFAULT_HEARTBEAT_INTERVAL = "30s"
DEFAULT_DRAIN_TIMEOUT = "10m"
PROGRESS_MARGIN_SECONDS = 600  # for scheduling and pulling the image, before the warm-up begins


def plan(deployment: LLMDeployment, defaults: PlanDefaults) -> Plan:
    """Resolve a deployment that has passed the rules of `api/rules.py`. Pure and total: it never fails on one."""
    spec = deployment.spec
    reasons: list[Reason] = []
    accelerator = _accelerator(spec.accelerator or Accelerator(), reasons)
    on_gpu = accelerator is AcceleratorType.GPU
    reasons.append(Reason("tensorParallelSize", "A replica is one pod with one device in this version."))
    reasons.append(Reason("quantization", "The weights are served as they are in the checkpoint."))
    engine = _engine(spec.engine or Engine(), on_gpu, reasons)
    warmup = spec.warmup or Warmup()
    return Plan(
        summary=f"{'1×GPU' if on_gpu else 'CPU'} TP1 None",
        accelerator=accelerator,
        gpus_per_replica=1 if on_gpu else 0,
        tensor_parallel_size=1,
        quantization="None",
        model_path=_model_path(spec),
        served_name=deployment.served_name,
        engine=engine,
        heartbeat_interval_seconds=duration.seconds(warmup.heartbeat_interval or DEFAULT_HEARTBEAT_INTERVAL),
        warmup_timeout_seconds=duration.seconds(warmup.timeout or DEFAULT_WARMUP_TIMEOUT),
        drain_timeout_seconds=duration.seconds((spec.rollout or Rollout()).drain_timeout or DEFAULT_DRAIN_TIMEOUT),
        runtime_image=_runtime_image(spec, defaults, reasons),
        resources=_resources(on_gpu, reasons),
        input_hash=input_hash(deployment),
        reasons=tuple(reasons),
    )


def progress_deadline_seconds(spec: LLMDeploymentSpec) -> int:
    """Seconds after which a rollout without progress counts as failed. Beside the plan: it restarts nothing."""
    if spec.rollout is not None and spec.rollout.progress_deadline is not None:
        return duration.seconds(spec.rollout.progress_deadline)
    timeout = (spec.warmup or Warmup()).timeout or DEFAULT_WARMUP_TIMEOUT
    return duration.seconds(timeout) + PROGRESS_MARGIN_SECONDS


def _accelerator(accelerator: Accelerator, reasons: list[Reason]) -> AcceleratorType:
    if accelerator.type is not None:
        reasons.append(Reason("accelerator", f"spec.accelerator.type asks for {accelerator.type}."))
        return accelerator.type
    reasons.append(Reason("accelerator", "A language model is served on a GPU unless accelerator.type says CPU."))
    return AcceleratorType.GPU


def _engine(engine: Engine, on_gpu: bool, reasons: list[Reason]) -> EnginePlan:
    """Batch limits: what the spec gives stands, and what it leaves open is fitted to what it gives."""
    tokens = engine.max_num_batched_tokens or max(DEFAULT_MAX_NUM_BATCHED_TOKENS, engine.max_num_seqs or 0)
    sequences = engine.max_num_seqs or min(DEFAULT_MAX_NUM_SEQS, tokens)
    utilization = engine.gpu_memory_utilization_percent or DEFAULT_GPU_MEMORY_UTILIZATION_PERCENT
    reasons += [
        _given_or(engine.max_model_len, "engine.maxModelLen", "Absent: the runtime takes what the model allows."),
        _given_or(
            engine.max_num_batched_tokens,
            "engine.maxNumBatchedTokens",
            f"The default of {DEFAULT_MAX_NUM_BATCHED_TOKENS}, or maxNumSeqs where that is more.",
        ),
        _given_or(
            engine.max_num_seqs,
            "engine.maxNumSeqs",
            f"The default of {DEFAULT_MAX_NUM_SEQS}, or maxNumBatchedTokens where that is less.",
        ),
    ]
    if on_gpu:
        reasons.append(
            _given_or(
                engine.gpu_memory_utilization_percent,
                "engine.gpuMemoryUtilizationPercent",
                f"The default of {DEFAULT_GPU_MEMORY_UTILIZATION_PERCENT} leaves room for the CUDA context.",
            )
        )
    return EnginePlan(engine.max_model_len, tokens, sequences, utilization if on_gpu else None)


def _given_or(given: int | None, field: str, otherwise: str) -> Reason:
    return Reason(field, otherwise if given is None else f"spec.{field} asks for {given}.")


def _model_path(spec: LLMDeploymentSpec) -> str:
    local = spec.model.source.local
    if local is None:  # the rules refuse every other source
        raise ValueError("spec.model.source: only local can be planned in this version")
    return local.path.rstrip("/") or "/"


def _runtime_image(spec: LLMDeploymentSpec, defaults: PlanDefaults, reasons: list[Reason]) -> str:
    if spec.runtime is not None and spec.runtime.image is not None:
        reasons.append(Reason("runtime.image", "spec.runtime.image asks for it."))
        return spec.runtime.image
    reasons.append(Reason("runtime.image", "The operator's default when the spec last changed."))
    return defaults.runtime_image


def _resources(on_gpu: bool, reasons: list[Reason]) -> ResourcePlan:
    """Small requests, so that a rollout's extra pod fits beside the old one; podTemplate changes each of them."""
    if on_gpu:
        reasons.append(Reason("resources", "One GPU, and enough memory to stage the weights on their way to it."))
        return ResourcePlan({"cpu": "1", "memory": "4Gi"}, {GPU_RESOURCE: "1"})
    reasons.append(Reason("resources", "For a small model: the KV cache takes its share of the memory limit."))
    return ResourcePlan({"cpu": "250m", "memory": "1Gi"}, {"memory": "4Gi"})
