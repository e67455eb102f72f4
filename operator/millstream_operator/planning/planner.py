"""From a spec to a plan: every value that the spec leaves open, chosen by rules that are written down.

    decide(deployment, defaults, facts) -> Plan | Infeasible     with model and GPUs known
    plan(deployment, defaults)          -> Plan                  from the spec alone: one GPU, or a CPU

The same functions serve the operator and the command line on a laptop, so they may look at their arguments and at
nothing else: no cluster, no files, no clock. The objective is in docs/planning.md: the fewest GPUs a replica whose KV
pool holds four requests of full length (or meets load and latency, where given), then the cheapest.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Protocol

from millstream_operator.api import duration
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.optimization import Parallelism, Quantization
from millstream_operator.api.rules import DEFAULT_WARMUP_TIMEOUT
from millstream_operator.api.spec import (
    Accelerator,
    AcceleratorType,
    Engine,
    LLMDeploymentSpec,
    Rollout,
    Switch,
    Warmup,
)
from millstream_operator.catalog.gpu_names import UnknownGPUError, find_part
from millstream_operator.inventory.node_kinds import Inventory
from millstream_operator.planning.choices.candidates import Outcome, Problem, Question, Stage
from millstream_operator.planning.choices.placement import Choice, NoPlacement, choose
from millstream_operator.planning.choices.placement_reasons import engine_reasons, placement_reasons
from millstream_operator.planning.choices.quantization import formats
from millstream_operator.planning.choices.speculation import SpeculationChoice, choose_speculation
from millstream_operator.planning.choices.waiting import find
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.facts_hash import facts_hash
from millstream_operator.planning.fixes.nearest import nearest_fixes
from millstream_operator.planning.model_path import model_path
from millstream_operator.planning.plan import (
    GPU_RESOURCE,
    EnginePlan,
    Fix,
    Infeasible,
    Plan,
    PlanDefaults,
    PlanReason,
    ResourcePlan,
)
from millstream_operator.planning.requires import requirements, unknown_facts
from millstream_operator.planning.resolved_spec import ResolvedSpec, batching, given_or, resolve_spec
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.planning.sizing.cpu_memory import CPU_MEMORY_LIMIT, cpu_memory

DEFAULT_DRAIN_TIMEOUT = "10m"
KEPT_REASONS = ("accelerator", "runtime.image", "engine.prefixCaching")  # of the plan from the spec alone
PROGRESS_MARGIN_SECONDS = 600  # for scheduling and pulling the image, before the warm-up begins


def decide(
    deployment: LLMDeployment, defaults: PlanDefaults, facts: Facts, *, explain: bool = True
) -> Plan | Infeasible:
    """The plan for these facts, or why there is none and what would help. Pure, total and deterministic.

    Without `explain` alternatives and fixes are left out, in a third of the time.
    """
    spec, shape = deployment.spec, facts.shape
    if shape is None:
        return plan(deployment, defaults, facts)
    if (spec.accelerator or Accelerator()).type is AcceleratorType.CPU:
        return _decide_cpu(deployment, defaults, facts)
    if facts.inventory is None:
        return plan(deployment, defaults, facts)
    speculation = choose_speculation(spec, facts.choosable)
    found = find(lambda known, told: _search(deployment, known, explain=told), facts, explain=explain)
    choice = found.choice
    if isinstance(choice, NoPlacement):
        blind_search = functools.partial(_search, explain=False)
        fixes = nearest_fixes(deployment, found.facts, choice, blind_search) if explain else ()
        return Infeasible(
            choice.problem.stage.constraint,
            _sentence(choice.problem.sentence),
            input_hash(deployment),
            choice.rejected,
            fixes,
        )
    planned = _planned(deployment, defaults, facts, choice, speculation)
    if found.waits is not None:
        return replace(planned, waits=True, reasons=(found.waits, *planned.reasons))
    return replace(planned, preferred=found.preferred)


def plan(deployment: LLMDeployment, defaults: PlanDefaults, facts: Facts | None = None) -> Plan:
    """What the spec alone decides: no ledger, no prediction, and one device unless parallelism says otherwise.

    For a deployment that has passed the rules of `api/rules.py` it never fails. What it cannot know it does not
    promise: a spec that asks for a budget or an objective gets `requires: [inventory]`.
    """
    spec, facts = deployment.spec, facts or Facts()
    reasons: list[PlanReason] = []
    asked = _asked(spec, reasons)
    speculation = choose_speculation(spec, facts.choosable)
    missing = _missing(deployment, facts, asked, speculation)
    return Plan(
        summary=asked.summary,
        accelerator=asked.accelerator,
        gpus_per_replica=asked.gpus,
        tensor_parallel_size=asked.tensor,
        pipeline_parallel_size=asked.pipeline,
        quantization=asked.method,
        kv_cache=asked.kv_cache,
        speculation=speculation.plan,
        model_path=model_path(spec, facts.model_revision),
        served_name=deployment.served_name,
        engine=_engine(spec, asked.on_gpu, reasons),
        warmup_timeout_seconds=duration.seconds(_warmup(spec).timeout or DEFAULT_WARMUP_TIMEOUT),
        drain_timeout_seconds=drain_timeout_seconds(spec),
        runtime_image=_runtime_image(spec, defaults, reasons),
        resources=_resources(asked.gpus, reasons),
        input_hash=input_hash(deployment),
        reasons=(*reasons, speculation.reason, *(facts.unknown if asked.on_gpu else ())),
        facts_hash=facts_hash(facts),
        product_labels=_product_labels(spec, facts),
        requires=(*missing, *unknown_facts(spec, facts)),
        rejected=speculation.rejected,
        model_revision=facts.model_revision,
        checkpoint_bytes=facts.checkpoint_bytes,
    )


def drain_timeout_seconds(spec: LLMDeploymentSpec) -> int:
    """Seconds that a leaving pod has to finish its requests."""
    return duration.seconds((spec.rollout or Rollout()).drain_timeout or DEFAULT_DRAIN_TIMEOUT)


def progress_deadline_seconds(spec: LLMDeploymentSpec) -> int:
    """Seconds after which a rollout without progress counts as failed. Beside the plan: it restarts nothing."""
    if spec.rollout is not None and spec.rollout.progress_deadline is not None:
        return duration.seconds(spec.rollout.progress_deadline)
    timeout = _warmup(spec).timeout or DEFAULT_WARMUP_TIMEOUT
    return duration.seconds(timeout) + PROGRESS_MARGIN_SECONDS


# With facts


def _search(deployment: LLMDeployment, facts: Facts, *, explain: bool = True) -> Choice | NoPlacement:
    """The best placement for a spec on an inventory."""
    shape, inventory = facts.shape, facts.inventory
    assert shape is not None  # noqa: S101 - `decide` asked
    assert inventory is not None  # noqa: S101
    resolved = resolve_spec(deployment.spec, shape)
    if resolved.max_model_len > shape.max_position_embeddings:
        longest = shape.max_position_embeddings
        sentence = f"engine.maxModelLen is {resolved.max_model_len}, and the model allows {longest} tokens"
        return NoPlacement(Problem(Stage.MEMORY, sentence), None, ())
    try:
        names = {find_part(facts.catalog, name).name for name in resolved.products}
    except UnknownGPUError as error:
        return NoPlacement(Problem(Stage.PRODUCTS, f"accelerator.products: {str(error).removesuffix('.')}"), None, ())
    kinds = tuple(kind for kind in inventory.kinds if not names or kind.part.name in names)
    draft = deployment.spec.speculation.draft_model if deployment.spec.speculation else None
    draft_method = draft.quantization_method.value if draft and draft.quantization_method else "Auto"
    return choose(
        Question(
            resolved=resolved,
            shape=shape,
            formats=formats(resolved, shape, facts.choosable),
            speculation=choose_speculation(deployment.spec, facts.choosable).plan,
            draft_shape=facts.draft_shape,
            draft_method=None if draft_method == "Auto" else draft_method,
            inventory=Inventory(kinds, inventory.refused, inventory.hypothetical),
        ),
        explain=explain,
    )


def _planned(
    deployment: LLMDeployment, defaults: PlanDefaults, facts: Facts, choice: Choice, speculation: SpeculationChoice
) -> Plan:
    """A choice written out: the plan from the spec alone, with all that facts decided over it."""
    best, candidate, part = choice.best, choice.best.candidate, choice.best.candidate.stock.part
    assert facts.shape is not None  # noqa: S101 - `decide` asked
    resolved = resolve_spec(deployment.spec, facts.shape)
    found = formats(resolved, facts.shape, facts.choosable)
    blind = plan(deployment, defaults, facts)
    resources: list[PlanReason] = []
    return replace(
        blind,
        summary=candidate.summary,
        product=part.name,
        product_labels=part.product_labels,
        gpus_per_replica=candidate.gpus,
        tensor_parallel_size=candidate.tensor,
        pipeline_parallel_size=candidate.pipeline,
        replicas=best.replicas,
        quantization=candidate.method,
        kv_cache=candidate.kv_cache,
        speculation=speculation.plan,
        engine=_engine_of(best, resolved, blind),
        resources=_resources(candidate.gpus, resources),
        memory=best.ledger,
        predicted=best.prediction,
        cost=best.cost,
        requires=_missing(deployment, facts, candidate, speculation),
        rejected=(*speculation.rejected, *found.rejected, *choice.rejected),
        reasons=(
            *(one for one in blind.reasons if one.field in KEPT_REASONS),
            *placement_reasons(best, deployment, facts),
            *found.reasons,
            *engine_reasons(resolved.reasons, best, blind),
            speculation.reason,
            *resources,
        ),
    )


def _engine_of(best: Outcome, resolved: ResolvedSpec, blind: Plan) -> EnginePlan:
    """The limits that the memory and the latency objective leave."""
    return EnginePlan(
        resolved.max_model_len,
        best.max_num_batched_tokens,
        best.max_num_seqs,
        resolved.gpu_memory_utilization_percent,
        blind.engine.prefix_caching,
    )


class _Placed(Protocol):
    """What a placement needs of the runtime, whoever chose it."""

    @property
    def tensor(self) -> int: ...
    @property
    def pipeline(self) -> int: ...
    @property
    def method(self) -> str: ...
    @property
    def kv_cache(self) -> str: ...


def _missing(
    deployment: LLMDeployment, facts: Facts, placed: _Placed, speculation: SpeculationChoice
) -> tuple[str, ...]:
    """What the runtime lacks to run it."""
    return requirements(
        deployment,
        facts.runtime,
        method=placed.method,
        kv_cache=placed.kv_cache,
        speculation=speculation.plan.method,
        tensor=placed.tensor,
        pipeline=placed.pipeline,
        shape=facts.shape,
    )


def _sentence(words: str) -> str:
    """With a capital, unless it starts with a field's name."""
    start = words if "." in words.split(" ", 1)[0] else f"{words[:1].upper()}{words[1:]}"
    return f"{start}."


def _decide_cpu(deployment: LLMDeployment, defaults: PlanDefaults, facts: Facts) -> Plan | Infeasible:
    """A CPU replica: the same plan as without facts, with its ledger, or what is short."""
    shape = facts.shape
    assert shape is not None  # noqa: S101 - `decide` asked
    memory = cpu_memory(deployment.spec, shape)
    length = (deployment.spec.engine or Engine()).max_model_len or min(shape.max_position_embeddings, 128)
    if memory.kv_cache_tokens >= length:
        blind = plan(deployment, defaults, facts)
        pool = f"The KV pool holds {memory.kv_cache_tokens:,} tokens of the container's memory."
        replicas = deployment.spec.replicas
        return replace(
            blind, replicas=replicas, memory=memory.ledger, reasons=(*blind.reasons, PlanReason("memory", pool))
        )
    short = -(-(length * shape.kv_elements_per_token() * 4) // (1 << 30))
    limit = "podTemplate.spec.containers[runtime].resources.limits.memory"
    needed = -(-(memory.ledger.usable_bytes - memory.ledger.headroom_bytes) // (1 << 30)) + short * 4
    message = (
        f"A CPU replica with {memory.ledger.usable_bytes >> 20} MiB of memory has room for "
        f"{max(0, memory.kv_cache_tokens)} tokens of KV cache beside its float32 weights; {length} are wanted."
    )
    fixes = (Fix(limit, f"{needed}Gi", "CPU TP1 None"),)
    return Infeasible("memory", message, input_hash(deployment), (), fixes)


# From the spec alone


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the spec itself says of the placement, with one device and the checkpoint's own format otherwise."""

    accelerator: AcceleratorType
    tensor: int
    pipeline: int
    method: str
    kv_cache: str

    @property
    def on_gpu(self) -> bool:
        return self.accelerator is AcceleratorType.GPU

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline if self.on_gpu else 0

    @property
    def summary(self) -> str:
        return f"{f'{self.gpus}×GPU' if self.on_gpu else 'CPU'} TP{self.tensor} {self.method}"


def _asked(spec: LLMDeploymentSpec, reasons: list[PlanReason]) -> _Asked:
    accelerator = _accelerator(spec.accelerator or Accelerator(), reasons)
    parallelism, quantization = spec.parallelism or Parallelism(), spec.quantization or Quantization()
    tensor, pipeline = parallelism.tensor, parallelism.pipeline
    reasons.append(given_or(tensor, "parallelism.tensor", "One device a replica where nothing else is known."))
    reasons.append(PlanReason("quantization", "The weights are served as they are in the checkpoint."))
    method, kv_cache = (
        asked.value if asked is not None and asked != "Auto" else "None"
        for asked in (quantization.method, quantization.kv_cache)
    )
    return _Asked(accelerator, tensor or 1, pipeline or 1, method, kv_cache)


def _warmup(spec: LLMDeploymentSpec) -> Warmup:
    return spec.warmup or Warmup()


def _accelerator(accelerator: Accelerator, reasons: list[PlanReason]) -> AcceleratorType:
    if accelerator.type is not None:
        reasons.append(PlanReason("accelerator", f"spec.accelerator.type asks for {accelerator.type}."))
        return accelerator.type
    reasons.append(PlanReason("accelerator", "A language model is served on a GPU unless accelerator.type says CPU."))
    return AcceleratorType.GPU


def _engine(spec: LLMDeploymentSpec, on_gpu: bool, reasons: list[PlanReason]) -> EnginePlan:
    length = (spec.engine or Engine()).max_model_len
    tokens, sequences, utilization, why = batching(spec, on_cpu=not on_gpu)
    reasons += [given_or(length, "engine.maxModelLen", "Absent: the runtime takes what the model allows."), *why]
    caching = (spec.engine or Engine()).prefix_caching
    otherwise = "Requests that begin alike share their KV blocks and compute them once."
    asked = f"spec.engine.prefixCaching asks for {caching}."
    reasons.append(PlanReason("engine.prefixCaching", asked if caching else otherwise))
    return EnginePlan(length, tokens, sequences, utilization if on_gpu else None, caching is not Switch.DISABLED)


def _product_labels(spec: LLMDeploymentSpec, facts: Facts) -> tuple[str, ...]:
    """Values of the node label for accelerator.products; a name that the catalogue lacks stands for itself."""
    labels: list[str] = []
    for name in (spec.accelerator or Accelerator()).products or ():
        try:
            labels += find_part(facts.catalog, name).product_labels
        except UnknownGPUError:
            labels.append(name)
    return tuple(dict.fromkeys(labels))


def _runtime_image(spec: LLMDeploymentSpec, defaults: PlanDefaults, reasons: list[PlanReason]) -> str:
    if spec.runtime is not None and spec.runtime.image is not None:
        reasons.append(PlanReason("runtime.image", "spec.runtime.image asks for it."))
        return spec.runtime.image
    reasons.append(PlanReason("runtime.image", "The operator's default when the spec last changed."))
    return defaults.runtime_image


def _resources(gpus: int, reasons: list[PlanReason]) -> ResourcePlan:
    """Small requests, so that a rollout's extra pod fits beside the old one; podTemplate changes each of them."""
    if gpus:
        reasons.append(
            PlanReason("resources", "The GPUs, and enough memory to stage the weights on their way to them.")
        )
        return ResourcePlan({"cpu": "1", "memory": "4Gi"}, {GPU_RESOURCE: str(gpus)})
    reasons.append(PlanReason("resources", "For a small model: the KV cache takes its share of the memory limit."))
    return ResourcePlan({"cpu": "250m", "memory": "1Gi"}, {"memory": CPU_MEMORY_LIMIT})
