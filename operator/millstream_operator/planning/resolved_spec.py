"""A spec as the planner reads it: plain numbers, defaults filled in, with the reason for each default."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_operator.api import duration
from millstream_operator.api.optimization import Parallelism, Quantization
from millstream_operator.api.spec import Accelerator, Engine, LLMDeploymentSpec
from millstream_operator.api.workload import BudgetEnforcement, Objectives, Profile, Tier, Workload
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.made_model import asked_method, made_method
from millstream_operator.planning.plan import PlanReason
from millstream_operator.planning.tier_defaults import batch_defaults, usual_lengths

KV_POOL_REQUESTS = 4  # requests of full length that the pool must hold where nothing else says how much


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSpec:
    """What is wanted. `None`: the planner chooses. `*_is_given`: the spec says so, so the planner may not change it."""

    profile: Profile | None
    max_model_len: int
    max_num_batched_tokens: int
    max_num_batched_tokens_is_given: bool
    max_num_seqs: int
    max_num_seqs_is_given: bool
    gpu_memory_utilization_percent: int
    tensor: int | None
    pipeline: int | None
    one_gpu: bool  # tier Startup, unless parallelism says otherwise
    products: tuple[str, ...]
    method: str
    is_made: bool = False  # the cluster quantizes the weights
    is_judged: bool = False  # a quality gate must pass first
    kv_cache: str
    input_tokens: int
    output_tokens: int
    requests_per_minute: int | None
    concurrency: int | None
    ttft_milliseconds: int | None
    itl_milliseconds: int | None
    max_monthly_usd: int | None
    budget_is_enforced: bool
    replicas: int
    fewest_autoscaled: int = 0  # autoscaling.minReplicas: the budget must pay for them, however low the load is
    max_model_len_is_given: bool = False
    utilization_is_given: bool = False
    kv_pool_requests: int = KV_POOL_REQUESTS  # requests of full length that the KV pool must hold by default
    reasons: tuple[PlanReason, ...]

    @property
    def has_load(self) -> bool:
        return self.requests_per_minute is not None or self.concurrency is not None

    @property
    def kv_floor_requests(self) -> tuple[tuple[int, int], ...]:
        """What the KV pool of a replica must hold for it to count as fitting: any of these, `(requests, tokens)`."""
        usual = self.input_tokens + self.output_tokens
        requests = min(self.kv_pool_requests, self.max_num_seqs)
        if self.tensor is not None:  # the spec insists on its GPUs: one full-length request must do
            return ((1, self.max_model_len),)
        if self.has_load:  # replicas follow from the load, so one need not hold more than a few usual requests
            return ((1, self.max_model_len), (requests, usual))
        return ((requests, self.max_model_len),)

    @property
    def kv_floor_tokens(self) -> int:
        """The most tokens of `kv_floor_requests`."""
        return max(requests * tokens for requests, tokens in self.kv_floor_requests)


def resolve_spec(spec: LLMDeploymentSpec, shape: ModelShape) -> ResolvedSpec:
    """Fill in what the spec leaves open and needs no GPU to decide."""
    engine, workload = spec.engine or Engine(), spec.workload or Workload()
    parallelism, quantization = spec.parallelism or Parallelism(), spec.quantization or Quantization()
    objectives, budget = spec.objectives or Objectives(), spec.budget
    tokens, seqs, utilization, reasons = batching(spec)
    lengths = usual_lengths(workload.profile)
    length, why = _max_model_len(engine, workload, shape)
    return ResolvedSpec(
        profile=workload.profile,
        max_model_len=length,
        max_num_batched_tokens=tokens,
        max_num_batched_tokens_is_given=engine.max_num_batched_tokens is not None,
        max_num_seqs=seqs,
        max_num_seqs_is_given=engine.max_num_seqs is not None,
        gpu_memory_utilization_percent=utilization,
        tensor=parallelism.tensor,
        pipeline=parallelism.pipeline,
        one_gpu=spec.tier is Tier.STARTUP and spec.parallelism is None,
        products=tuple((spec.accelerator or Accelerator()).products or ()),
        method=asked_method(spec),
        is_made=made_method(spec) is not None,
        is_judged=quantization.quality_gate is not None,
        kv_cache=(quantization.kv_cache or "Auto") + "",
        input_tokens=min(workload.input_tokens or lengths.input_tokens, max(1, length // 2)),
        output_tokens=min(workload.output_tokens or lengths.output_tokens, max(1, length // 2)),
        requests_per_minute=workload.requests_per_minute,
        concurrency=workload.concurrency,
        ttft_milliseconds=duration.milliseconds(objectives.ttft.p95) if objectives.ttft else None,
        itl_milliseconds=duration.milliseconds(objectives.itl.p95) if objectives.itl else None,
        max_monthly_usd=budget.max_monthly_usd if budget else None,
        budget_is_enforced=budget is not None and budget.enforcement is not BudgetEnforcement.OBSERVE,
        replicas=wanted_replicas(spec),
        fewest_autoscaled=fewest_autoscaled(spec),
        max_model_len_is_given=engine.max_model_len is not None,
        utilization_is_given=engine.gpu_memory_utilization_percent is not None,
        reasons=(PlanReason("engine.maxModelLen", why), *reasons),
    )


def wanted_replicas(spec: LLMDeploymentSpec) -> int:
    """spec.replicas, as far as autoscaling lets them be: it writes that field, up to its own limit."""
    most = spec.autoscaling.max_replicas if spec.autoscaling is not None else spec.replicas
    return max(1, min(spec.replicas, most))


def fewest_autoscaled(spec: LLMDeploymentSpec) -> int:
    """autoscaling.minReplicas; 0 without autoscaling."""
    return (spec.autoscaling.min_replicas or 0) if spec.autoscaling is not None else 0


def batching(spec: LLMDeploymentSpec, *, on_cpu: bool = False) -> tuple[int, int, int, tuple[PlanReason, ...]]:
    """maxNumBatchedTokens, maxNumSeqs, memory share: what the spec gives stands, what it leaves open is fitted."""
    engine, profile = spec.engine or Engine(), spec.workload.profile if spec.workload else None
    defaults = batch_defaults(spec.tier, profile)
    small = batch_defaults(None, None)
    default_tokens, default_seqs = defaults.max_num_batched_tokens, defaults.max_num_seqs
    if on_cpu:
        default_tokens = min(default_tokens, small.max_num_batched_tokens)
        default_seqs = min(default_seqs, small.max_num_seqs)
    tokens = engine.max_num_batched_tokens or max(default_tokens, engine.max_num_seqs or 0)
    seqs = engine.max_num_seqs or min(default_seqs, tokens)
    utilization = engine.gpu_memory_utilization_percent or defaults.gpu_memory_utilization_percent
    reasons = [
        given_or(
            engine.max_num_batched_tokens,
            "engine.maxNumBatchedTokens",
            f"The default of {default_tokens} ({defaults.source}), or maxNumSeqs where that is more.",
        ),
        given_or(
            engine.max_num_seqs,
            "engine.maxNumSeqs",
            f"The default of {default_seqs} ({defaults.source}), or maxNumBatchedTokens where that is less.",
        ),
    ]
    if not on_cpu:
        why = f"The default of {utilization} ({defaults.source}); the rest is for what nobody foresees."
        reasons.append(given_or(engine.gpu_memory_utilization_percent, "engine.gpuMemoryUtilizationPercent", why))
    return tokens, seqs, utilization, tuple(reasons)


def given_or(given: int | None, field: str, otherwise: str) -> PlanReason:
    return PlanReason(field, otherwise if given is None else f"spec.{field} asks for {given}.")


def _max_model_len(engine: Engine, workload: Workload, shape: ModelShape) -> tuple[int, str]:
    allowed = shape.max_position_embeddings
    if engine.max_model_len is not None:
        return engine.max_model_len, f"spec.engine.maxModelLen asks for {engine.max_model_len}."
    lengths = usual_lengths(workload.profile)
    wanted = (workload.input_tokens or lengths.input_tokens) + (workload.output_tokens or lengths.output_tokens)
    length = min(allowed, max(lengths.max_model_len, 2 * wanted))
    if length == allowed:
        return length, f"All that the model allows: {allowed}."
    return length, f"Twice the usual request or more; the model allows {allowed}, at a price in KV cache."
