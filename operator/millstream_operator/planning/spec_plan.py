"""Plan from the spec alone: no ledger, no prediction, and one device unless parallelism says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from millstream_operator.api import duration
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.optimization import Parallelism, Quantization
from millstream_operator.api.rules import DEFAULT_WARMUP_TIMEOUT
from millstream_operator.api.spec import Accelerator, AcceleratorType, Engine, LLMDeploymentSpec, Switch, Warmup
from millstream_operator.api.workload import Workload
from millstream_operator.catalog.gpu_names import UnknownGPUError, find_part
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.choices.cpu_dtype import WIDEST, asked_dtype, cpu_dtype
from millstream_operator.planning.choices.kv_layout import hybrid_flag
from millstream_operator.planning.choices.quantization import (
    ROUNDED_REASON,
    gguf_left_out,
    is_plain_gguf,
    plain_gguf_reason,
    unnamed_method,
)
from millstream_operator.planning.choices.rounded_weights import as_loaded, is_rounded, may_be_rounded
from millstream_operator.planning.choices.speculation import SpeculationChoice, choose_speculation
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.facts_hash import facts_hash
from millstream_operator.planning.made_model import asked_method, made_method, made_path
from millstream_operator.planning.model_path import draft_path, model_path, tuned_path
from millstream_operator.planning.plan import DraftFiles, EnginePlan, Plan, PlanDefaults, PlanReason
from millstream_operator.planning.pod_resources import replica_resources
from millstream_operator.planning.requires import requirements, unknown_facts, usable_draft, usable_draft_shape
from millstream_operator.planning.resolved_spec import batching, given_or
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.planning.sizing.draft_gain import draft_share, most_speedup_percent
from millstream_operator.planning.sizing.roofline import SpeculationSpeed
from millstream_operator.planning.timeouts import drain_timeout_seconds

Reasons = tuple[PlanReason, ...]


class Placed(Protocol):
    """What a placement needs of the runtime, whether the spec or the planner chose it."""

    @property
    def tensor(self) -> int: ...
    @property
    def pipeline(self) -> int: ...
    @property
    def method(self) -> str: ...
    @property
    def kv_cache(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _SpecPlacement:
    """The placement that the spec itself names; one device and the checkpoint's own format where it names none."""

    accelerator: AcceleratorType
    tensor: int
    pipeline: int
    method: str
    kv_cache: str
    reasons: Reasons
    dtype: str | None  # of weights that no method quantises; None: not known

    @property
    def on_gpu(self) -> bool:
        return self.accelerator is AcceleratorType.GPU

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline if self.on_gpu else 0

    @property
    def summary(self) -> str:
        weights = self.dtype if self.method == "None" else self.method
        layout = f"{f'{self.gpus}×GPU' if self.on_gpu else 'CPU'} TP{self.tensor}"
        return f"{layout} {weights}" if weights is not None else layout


def plan_from_spec(deployment: LLMDeployment, defaults: PlanDefaults, facts: Facts | None = None) -> Plan:
    """Return what the spec alone decides.

    For a deployment that has passed the rules of `api/rules.py` it never fails. What it cannot know it does not
    promise: a spec that asks for a budget or an objective gets `requires: [inventory]`.
    """
    spec, facts = deployment.spec, facts or Facts()
    placement = _spec_placement(spec, facts)
    engine, engine_reasons = _engine(spec, facts, placement.on_gpu)
    image, image_reason = _runtime_image(spec, defaults)
    resources, resources_reason = replica_resources(spec, facts, placement.gpus, placement.tensor)
    speculation = choose_speculation(spec, facts.choosable)
    if not placement.on_gpu:
        shape = as_loaded(spec, facts.shape, facts.runtime) if facts.shape is not None else None
        held = replace(facts, shape=shape, draft_shape=usable_draft_shape(spec, facts))
        speculation = _with_gain(_within_heads(speculation, facts.draft_shape), held)
    missing = missing_capabilities(deployment, facts, placement, speculation)
    unknown = facts.unknown if placement.on_gpu else ()
    return Plan(
        summary=placement.summary,
        accelerator=placement.accelerator,
        gpus_per_replica=placement.gpus,
        tensor_parallel_size=placement.tensor,
        pipeline_parallel_size=placement.pipeline,
        quantization=placement.method,
        asked_quantization=_asked_of_runtime(spec, facts),
        kv_cache=placement.kv_cache,
        dtype=placement.dtype,
        speculation=speculation.plan,
        model_path=weights_path(deployment, facts.model_revision),
        served_name=deployment.served_name,
        engine=engine,
        warmup_timeout_seconds=duration.seconds((spec.warmup or Warmup()).timeout or DEFAULT_WARMUP_TIMEOUT),
        drain_timeout_seconds=drain_timeout_seconds(spec),
        runtime_image=image,
        resources=resources,
        input_hash=input_hash(deployment),
        reasons=(
            *(*placement.reasons, *_left_out_file(facts.shape), *engine_reasons, image_reason, resources_reason),
            *(speculation.reason, *_tuned_reason(facts), *unknown, *_load_on_cpu(spec, placement.on_gpu)),
        ),
        facts_hash=facts_hash(facts),
        product_labels=_product_labels(spec, facts),
        requires=(*missing, *unknown_facts(spec, facts)),
        rejected=speculation.rejected,
        model_revision=facts.model_revision,
        checkpoint_bytes=facts.checkpoint_bytes,
        api_keys=spec.auth.api_keys_secret_ref if spec.auth is not None else None,
        draft=_draft_files(spec, facts),
    )


def weights_path(deployment: LLMDeployment, revision: str | None) -> str:
    """Return the folder that the pods load, below the model root: of the source, or of what the cluster makes of it.

    `revision`: what the source was resolved to; where not known, the spec's revision is used.
    """
    if made_method(deployment.spec) is not None:
        return made_path(deployment, revision)
    return model_path(deployment.spec, revision)


def _within_heads(choice: SpeculationChoice, draft: ModelShape | None) -> SpeculationChoice:
    """The same with as many tokens as Medusa heads propose at a time: each guesses one."""
    head, plan = draft.draft_head if draft is not None else None, choice.plan
    if plan.method != "Medusa" or head is None or head.drafts_per_pass >= plan.max_draft_tokens:
        return choice
    few = f" The folder has {head.drafts_per_pass} heads, so no more than {head.drafts_per_pass} tokens are proposed."
    reason = replace(choice.reason, reason=f"{choice.reason.reason}{few}")
    return replace(choice, plan=replace(plan, max_draft_tokens=head.drafts_per_pass), reason=reason)


def _with_gain(choice: SpeculationChoice, facts: Facts) -> SpeculationChoice:
    """The same with what it gains at most, and the assumption behind that; unchanged where a shape is not known."""
    target, draft, plan = facts.shape, facts.draft_shape, choice.plan
    if plan.method == "Disabled" or (plan.method != "NGram" and (target is None or draft is None)):
        return choice
    share = draft_share(target, draft) if target is not None and draft is not None else 0.0
    accepted = plan.assumed_acceptance_percent / 100
    most = most_speedup_percent(SpeculationSpeed(draft_tokens=plan.max_draft_tokens, acceptance=accepted), share)
    gain = (
        f" At most {most / 100:.2f} times the tokens per second of one request, if "
        f"{plan.assumed_acceptance_percent} % of the drafts are accepted (assumed)."
    )
    reason = replace(choice.reason, reason=f"{choice.reason.reason}{gain}")
    return replace(choice, plan=replace(plan, most_speedup_percent=most), reason=reason)


def _draft_files(spec: LLMDeploymentSpec, facts: Facts) -> DraftFiles | None:
    """Nothing where the draft was not inspected, which is so wherever the runtime does not draft with it."""
    source = usable_draft(spec, facts.runtime)
    if source is None or not facts.draft_is_inspected:
        return None
    tuned = facts.tuned_draft
    path = draft_path(spec, source, facts.draft_revision) if tuned is None else tuned_path(tuned)
    return DraftFiles(path, facts.draft_revision, facts.draft_checkpoint_bytes, tuned)


def _left_out_file(shape: ModelShape | None) -> Reasons:
    """Say that the source has a GGUF file, too, which is not served."""
    if shape is None or not shape.gguf_left_out:
        return ()
    return (PlanReason("model.source", f"The source holds *.safetensors and a GGUF file: {gguf_left_out(shape)}."),)


def _tuned_reason(facts: Facts) -> Reasons:
    """Nothing where the draft is served as it is in its source."""
    if facts.tuned_draft is None:
        return ()
    why = "The draft was tuned on speculation.tuning.dataset, and more of its drafts stand on held-out prompts."
    return (PlanReason("speculation.draftModel", why),)


def _load_on_cpu(spec: LLMDeploymentSpec, on_gpu: bool) -> Reasons:
    """Say that the workload's numbers are not used on a CPU."""
    workload = spec.workload or Workload()
    numbers = (workload.input_tokens, workload.output_tokens, workload.requests_per_minute, workload.concurrency)
    if on_gpu or all(number is None for number in numbers):
        return ()
    why = (
        "The load is not predicted on a CPU: measure one replica with `millstream bench`, and set spec.replicas by it."
    )
    return (PlanReason("workload", why),)


def missing_capabilities(
    deployment: LLMDeployment, facts: Facts, placed: Placed, speculation: SpeculationChoice
) -> tuple[str, ...]:
    """Return what the runtime lacks to run this placement."""
    return requirements(
        deployment,
        facts.runtime,
        method=placed.method,
        kv_cache=placed.kv_cache,
        speculation=speculation.plan.method,
        tensor=placed.tensor,
        pipeline=placed.pipeline,
        shape=facts.shape,
        draft=usable_draft_shape(deployment.spec, facts),
    )


def _asked_of_runtime(spec: LLMDeploymentSpec, facts: Facts) -> str | None:
    """The format that the runtime has to find in a checkpoint, or to round it to; None where the planner has seen it,
    or none is named."""
    asked, shape = asked_method(spec), facts.shape
    if shape is not None:
        return asked if is_rounded(spec, shape, facts.runtime) else None
    return asked if asked not in ("Auto", "None") else None  # None is what an absent method plans


def _spec_placement(spec: LLMDeploymentSpec, facts: Facts) -> _SpecPlacement:
    shape = facts.shape
    accelerator, accelerator_reason = _accelerator(spec.accelerator or Accelerator())
    parallelism, asked_kv = spec.parallelism or Parallelism(), (spec.quantization or Quantization()).kv_cache
    tensor, pipeline = parallelism.tensor, parallelism.pipeline
    method, kv_cache = (
        asked if asked is not None and asked != "Auto" else "None"
        for asked in (asked_method(spec), asked_kv + "" if asked_kv is not None else None)
    )
    why = "The weights are served as they are in the checkpoint."
    if shape is None and may_be_rounded(spec, facts.runtime):
        why = f"{why.removesuffix('.')}, or rounded to {method} where it has 16 or 32 bits."
    if shape is not None and (stored := shape.quantization) is not None:
        whose = "The checkpoint's own quantization_config"
        if made_method(spec) is not None:
            whose = f"Made in the cluster by {made_method(spec)} with quantization.calibration"
        method, unnamed = stored.named(asked_method(spec)), unnamed_method(stored, asked_method(spec))
        why = f"{whose}: {'' if unnamed else f'{method}, '}{stored.bits} bit.{unnamed}"
    elif shape is not None and is_plain_gguf(asked_method(spec), shape):
        method, why = "None", plain_gguf_reason(shape)
    elif shape is not None and is_rounded(spec, shape, facts.runtime):
        why = f"spec.quantization.method asks for {method}. {ROUNDED_REASON}"
    kv_reason = PlanReason("kvCache", f"spec.quantization.kvCache asks for {kv_cache}.")
    reasons = (
        accelerator_reason,
        given_or(tensor, "parallelism.tensor", "One device a replica where nothing else is known."),
        PlanReason("quantization", why),
        *((kv_reason,) if kv_cache != "None" else ()),
    )
    known = shape.dtype if shape is not None else None
    dtype = known if accelerator is AcceleratorType.GPU else cpu_dtype(spec, shape, facts.runtime)
    return _SpecPlacement(accelerator, tensor or 1, pipeline or 1, method, kv_cache, reasons, dtype)


def _accelerator(accelerator: Accelerator) -> tuple[AcceleratorType, PlanReason]:
    if accelerator.type is not None:
        return accelerator.type, PlanReason("accelerator", f"spec.accelerator.type asks for {accelerator.type}.")
    why = "A language model is served on a GPU unless accelerator.type says CPU."
    return AcceleratorType.GPU, PlanReason("accelerator", why)


def _engine(spec: LLMDeploymentSpec, facts: Facts, on_gpu: bool) -> tuple[EnginePlan, Reasons]:
    length, caching = (spec.engine or Engine()).max_model_len, (spec.engine or Engine()).prefix_caching
    hybrid = hybrid_flag(spec, facts.runtime)
    tokens, sequences, utilization, batching_reasons = batching(spec, on_cpu=not on_gpu)
    otherwise = "Requests that begin alike share their KV blocks and compute them once."
    asked = f"spec.engine.prefixCaching asks for {caching}."
    reasons = (
        given_or(length, "engine.maxModelLen", "Absent: the runtime takes what the model allows."),
        *batching_reasons,
        PlanReason("engine.prefixCaching", asked if caching else otherwise),
        *_hybrid_reason(hybrid),
        *_dtype_reason(spec, facts, on_gpu),
    )
    used_utilization = utilization if on_gpu else None
    enabled, dtype = caching is not Switch.DISABLED, asked_dtype(spec)
    return EnginePlan(length, tokens, sequences, used_utilization, enabled, hybrid, dtype), reasons


def _hybrid_reason(hybrid: bool | None) -> Reasons:
    if hybrid is None:
        return ()
    asked = Switch.ENABLED if hybrid else Switch.DISABLED
    return (PlanReason("engine.hybridKvCacheManager", f"spec.engine.hybridKvCacheManager asks for {asked}."),)


def _dtype_reason(spec: LLMDeploymentSpec, facts: Facts, on_gpu: bool) -> Reasons:
    """Why a CPU holds weights as it does, where the spec says so, or they take fewer bits than what is computed."""
    asked = asked_dtype(spec)
    if asked is not None:
        return (PlanReason("engine.dtype", f"spec.engine.dtype asks for {asked}."),)
    if on_gpu or (dtype := cpu_dtype(spec, facts.shape, facts.runtime)) == WIDEST:
        return ()
    why = f"Weights are held in the checkpoint's {dtype} and computed with in FP32; engine.dtype float32 doubles them."
    return (PlanReason("engine.dtype", why),)


def _product_labels(spec: LLMDeploymentSpec, facts: Facts) -> tuple[str, ...]:
    """Return the node labels of accelerator.products; a name that the catalogue lacks stands for itself."""
    labels: list[str] = []
    for name in (spec.accelerator or Accelerator()).products or ():
        try:
            labels += find_part(facts.catalog, name).product_labels
        except UnknownGPUError:
            labels.append(name)
    return tuple(dict.fromkeys(labels))


def _runtime_image(spec: LLMDeploymentSpec, defaults: PlanDefaults) -> tuple[str, PlanReason]:
    if spec.runtime is not None and spec.runtime.image is not None:
        return spec.runtime.image, PlanReason("runtime.image", "spec.runtime.image asks for it.")
    return defaults.runtime_image, PlanReason("runtime.image", "The operator's default when the spec last changed.")
