"""From a spec to a plan: every value that the spec leaves open, by the rules of docs/planning.md.

    decide(deployment, defaults, facts)    -> Plan | Infeasible     with model and GPUs known
    plan_from_spec(deployment, defaults)   -> Plan                  from the spec alone (`spec_plan.py`)

The same functions serve the operator and the command line on a laptop, so they read their arguments and nothing else:
no cluster, no files, no clock. The objective: the fewest GPUs per replica whose KV pool holds four requests of full
length (or meets load and latency, where given); of the products that have them, the cheapest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.spec import Accelerator, AcceleratorType
from millstream_operator.catalog.gpu_names import UnknownGPUError, find_part
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.inventory.node_kinds import Inventory
from millstream_operator.planning.choices.candidates import Question
from millstream_operator.planning.choices.context_length import length_problem
from millstream_operator.planning.choices.draft_fit import cpu_draft_problem, gpu_draft_problem
from millstream_operator.planning.choices.four_bit import may_advise, with_four_bits
from millstream_operator.planning.choices.kv_layout import is_grouped, planned_cpu_memory
from millstream_operator.planning.choices.outcome import Outcome, Problem, Stage
from millstream_operator.planning.choices.placement import Choice, NoPlacement, choose_placement
from millstream_operator.planning.choices.placement_reasons import (
    calibration_reasons,
    engine_reasons,
    placement_reasons,
    rate_reasons,
)
from millstream_operator.planning.choices.quantization import choose_formats, contradiction
from millstream_operator.planning.choices.rounded_weights import as_loaded
from millstream_operator.planning.choices.smaller_defaults import choose_with_defaults
from millstream_operator.planning.choices.speculation import SpeculationChoice, choose_speculation
from millstream_operator.planning.choices.waiting import search_in_order
from millstream_operator.planning.facts import EVERYTHING, Facts
from millstream_operator.planning.fixes.nearest import nearest_fixes
from millstream_operator.planning.left_out_nodes import plain_reasons, reasons, verdicts, with_sentences
from millstream_operator.planning.made_model import as_four_bit, as_made, asked_method, made_problem
from millstream_operator.planning.plan import EnginePlan, Infeasible, Plan, PlanDefaults, PlanReason
from millstream_operator.planning.pod_resources import replica_resources
from millstream_operator.planning.requires import INVENTORY, refusal, usable_draft_shape
from millstream_operator.planning.resolved_spec import ResolvedSpec, resolve_spec
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.planning.sizing.cpu_memory import CpuMemory, planned_length, shortest_length
from millstream_operator.planning.spec_plan import missing_capabilities, plan_from_spec
from millstream_operator.planning.unknown_inventory import (
    FITS_ANYWHERE,
    absent_machines,
    counts_gpus,
    fits_any_gpu,
    impossible_size,
    named_machines,
    refused,
    waits_for_machines,
)

# Of the plan from the spec alone.
KEPT_REASONS = ("accelerator", "model.source", "runtime.image", "engine.prefixCaching", "engine.hybridKvCacheManager")


def decide(
    deployment: LLMDeployment, defaults: PlanDefaults, facts: Facts, *, explain: bool = True
) -> Plan | Infeasible:
    """The plan for these facts, or why there is none and what would help. Pure, total and deterministic.

    Without `explain` alternatives and fixes are left out, in a third of the time.
    """
    spec = deployment.spec
    if (problem := made_problem(spec, facts)) is not None:
        return Infeasible("quantization", _sentence(problem), input_hash(deployment))
    facts = as_made(spec, facts)
    shape = facts.shape
    if shape is None:
        return plan_from_spec(deployment, defaults, facts)
    on_cpu, asked = (spec.accelerator or Accelerator()).type is AcceleratorType.CPU, asked_method(spec)
    if (on_cpu or facts.inventory is None) and (problem := contradiction(asked, shape)) is not None:
        infeasible = Infeasible("quantization", _sentence(problem), input_hash(deployment))
        return _with_fixes(infeasible, deployment, defaults, facts) if explain else infeasible
    if on_cpu:
        return _decide_cpu(deployment, defaults, facts, explain=explain)
    draft = usable_draft_shape(spec, facts) if facts.draft_is_inspected else None
    online, target = facts.runtime.online_quantization_methods, as_loaded(spec, shape, facts.runtime)
    if draft is not None and (problem := gpu_draft_problem(spec, target, draft, online)) is not None:
        infeasible = Infeasible("speculation", _sentence(problem), input_hash(deployment))
        return _with_fixes(infeasible, deployment, defaults, facts) if explain else infeasible
    image = (spec.runtime.image if spec.runtime else None) or defaults.runtime_image
    facts = replace(facts, calibration=facts.calibration.of(image, shape))
    if facts.inventory is None:
        return _decide_without_gpus(deployment, defaults, facts, explain=explain)
    return _decide_on_gpus(deployment, defaults, facts, explain=explain)


def _decide_without_gpus(
    deployment: LLMDeployment, defaults: PlanDefaults, facts: Facts, *, explain: bool
) -> Plan | Infeasible:
    """The model's shape is known and the GPUs are not: `unknown_inventory.py` says what is planned."""
    spec, shape = deployment.spec, facts.shape
    assert shape is not None  # noqa: S101 - `decide` asked
    left_out = facts.unknown_gpus.left_out if facts.unknown_gpus is not None and explain else ()
    if (machines := named_machines(facts, spec)) is not None:
        assumed = replace(facts, inventory=machines, capacity=None, unknown=())
        planned = _decide_on_gpus(deployment, defaults, assumed, explain=explain)
        if isinstance(planned, Infeasible):
            return planned
        search = functools.partial(_search, deployment, resolve_spec(spec, shape), explain=False)
        said = reasons(verdicts(left_out, facts, search))
        return replace(planned, waits=True, reasons=(waits_for_machines(facts, machines), *planned.reasons, *said))
    if counts_gpus(spec):
        if (problem := impossible_size(spec, shape)) is not None:
            return Infeasible("parallelism", problem, input_hash(deployment))
        if (too_long := length_problem(spec, shape)) is not None:
            infeasible = Infeasible(Stage.MEMORY.constraint, _sentence(too_long), input_hash(deployment))
            return _with_fixes(infeasible, deployment, defaults, facts) if explain else infeasible
    resolved = replace(resolve_spec(spec, shape), products=())
    blind = _planned_blindly(deployment, defaults, facts, resolved)
    if blind is not None and (INVENTORY not in blind.requires or not left_out):
        return blind
    search = functools.partial(_search, deployment, resolved, explain=False)
    infeasible = refused(deployment, facts, verdicts(left_out, facts, search))
    return _with_fixes(infeasible, deployment, defaults, facts) if left_out else infeasible


def _planned_blindly(
    deployment: LLMDeployment, defaults: PlanDefaults, facts: Facts, resolved: ResolvedSpec
) -> Plan | None:
    """The plan from the spec alone, where it counts the GPUs or one of any product is enough; None otherwise."""
    if counts_gpus(deployment.spec):
        return plan_from_spec(deployment, defaults, facts)
    if not fits_any_gpu(functools.partial(_place, deployment, resolved, explain=False), facts):
        return None
    blind = plan_from_spec(deployment, defaults, facts)
    others = (reason for reason in blind.reasons if reason.field != FITS_ANYWHERE.field)
    return replace(blind, reasons=(FITS_ANYWHERE, *others))


def _decide_on_gpus(
    deployment: LLMDeployment, defaults: PlanDefaults, facts: Facts, *, explain: bool
) -> Plan | Infeasible:
    """The best placement on known GPUs: on free ones, else on all of them."""
    spec, shape = deployment.spec, facts.shape
    assert shape is not None  # noqa: S101 - `decide` asked
    speculation, resolved = choose_speculation(spec, facts.choosable), resolve_spec(spec, shape)
    machines = absent_machines(facts, spec)
    may_come = (machines, waits_for_machines(facts, machines)) if machines is not None else None
    search = functools.partial(_search, deployment, resolved)
    found = search_in_order(functools.partial(search, may_shorten=False), facts, may_come, explain=explain)
    if isinstance(found.choice, NoPlacement):
        found = search_in_order(search, facts, may_come, explain=explain)
    choice, without = found.choice, functools.partial(search, explain=False)
    if isinstance(choice, NoPlacement):
        infeasible = Infeasible(
            choice.problem.stage.constraint,
            with_sentences(_sentence(choice.problem.sentence), _left_out(found.facts, without if explain else None)),
            input_hash(deployment),
            choice.rejected,
        )
        if not explain:
            return infeasible
        explained = _with_fixes(infeasible, deployment, defaults, facts)
        return explained if explained.fixes else _beyond_the_runtime(explained, deployment, defaults, facts)
    planned = _planned(deployment, defaults, facts, choice, speculation)
    if explain and (resolved.pipeline or 1) > facts.choosable.max_pipeline_parallel_size:
        words = refusal(planned.requires) or ""
        asked = Infeasible(Stage.PARALLELISM.constraint, words, input_hash(deployment))
        if (explained := _with_fixes(asked, deployment, defaults, facts)).fixes:
            return explained
    if explain and may_advise(resolved, shape):
        four_bits = without(replace(found.facts, shape=as_four_bit(shape)))
        advised = with_four_bits(planned.rejected, choice.best, four_bits, facts.runtime)
        planned = replace(planned, rejected=advised)
    if found.waits is not None:
        said = _left_out(facts, without if explain else None)
        return replace(planned, waits=True, reasons=(found.waits, *planned.reasons, *said))
    return replace(planned, preferred=found.preferred, reasons=(*planned.reasons, *_left_out(facts, None)))


def _with_fixes(found: Infeasible, deployment: LLMDeployment, defaults: PlanDefaults, facts: Facts) -> Infeasible:
    """The same with what would help, or with what the runtime lacks wherever the model fits."""

    def replan(changed: LLMDeployment, known: Facts) -> Plan | Infeasible:
        return decide(changed, defaults, known, explain=False)

    nearest = nearest_fixes(deployment, facts, found.constraint, replan)
    unsupported = [plan for plan in nearest.unsupported if INVENTORY not in plan.requires]  # that is no lack of it
    if not unsupported:
        return replace(found, fixes=nearest.fixes)
    plans, requires = " or ".join(plan.summary for plan in unsupported), unsupported[0].requires
    lacking = f"{found.message} It would fit as {plans}. {refusal(requires)}"
    return replace(found, message=lacking, requires=requires)


def _beyond_the_runtime(
    found: Infeasible, deployment: LLMDeployment, defaults: PlanDefaults, facts: Facts
) -> Plan | Infeasible:
    """What a later runtime could do where nothing helps this one: a plan with `requires`, to look at."""
    limits = facts.choosable
    choosable = replace(
        limits,
        max_tensor_parallel_size=max(limits.max_tensor_parallel_size, EVERYTHING.max_tensor_parallel_size),
        max_pipeline_parallel_size=max(limits.max_pipeline_parallel_size, EVERYTHING.max_pipeline_parallel_size),
    )
    if choosable == limits:
        return found
    later = decide(deployment, defaults, replace(facts, choosable=choosable))
    return later if isinstance(later, Plan) or later.requires else found


def _search(
    deployment: LLMDeployment, resolved: ResolvedSpec, facts: Facts, explain: bool = True, *, may_shorten: bool = True
) -> Choice | NoPlacement:
    """The best placement for a spec on an inventory, with smaller defaults where these help."""
    question = _question(deployment, resolved, facts)
    if isinstance(question, NoPlacement):
        return question
    return choose_with_defaults(question, may_shorten=may_shorten, explain=explain)


def _place(
    deployment: LLMDeployment, resolved: ResolvedSpec, facts: Facts, explain: bool = True
) -> Choice | NoPlacement:
    """The best placement on an inventory with these defaults."""
    question = _question(deployment, resolved, facts)
    return question if isinstance(question, NoPlacement) else choose_placement((question,), explain=explain)


def _question(deployment: LLMDeployment, resolved: ResolvedSpec, facts: Facts) -> Question | NoPlacement:
    """What placements are judged by, or what is wrong before there is any."""
    shape, inventory = facts.shape, facts.inventory
    assert shape is not None  # noqa: S101 - `decide` asked
    assert inventory is not None  # noqa: S101
    if (too_long := length_problem(deployment.spec, shape)) is not None:
        return NoPlacement(Problem(Stage.MEMORY, too_long), None, ())
    try:
        names = {find_part(facts.catalog, name).name for name in resolved.products}
    except UnknownGPUError as error:
        return NoPlacement(Problem(Stage.PRODUCTS, f"accelerator.products: {str(error).removesuffix('.')}"), None, ())
    kinds = tuple(kind for kind in inventory.kinds if not names or kind.part.name in names)
    draft = deployment.spec.speculation.draft_model if deployment.spec.speculation else None
    draft_method = draft.quantization_method.value if draft and draft.quantization_method else "Auto"
    return Question(
        resolved=resolved,
        shape=as_loaded(deployment.spec, shape, facts.runtime),
        formats=choose_formats(resolved, shape, facts.choosable, facts.runtime),
        speculation=choose_speculation(deployment.spec, facts.choosable).plan,
        draft_shape=facts.draft_shape,
        draft_method=None if draft_method == "Auto" else draft_method,
        inventory=Inventory(kinds, inventory.refused, inventory.hypothetical),
        max_tensor=facts.choosable.max_tensor_parallel_size,
        max_pipeline=facts.choosable.max_pipeline_parallel_size,
        calibration=facts.calibration,
        is_grouped=bool(is_grouped(deployment.spec, facts.runtime)),
        only_free=facts.capacity is not None and facts.capacity.kinds != inventory.kinds,
    )


def _planned(
    deployment: LLMDeployment,
    defaults: PlanDefaults,
    facts: Facts,
    choice: Choice,
    speculation: SpeculationChoice,
) -> Plan:
    """A choice written out: the plan from the spec alone, with all that facts decided over it."""
    best, resolved = choice.best, choice.resolved
    candidate, part = best.candidate, best.candidate.stock.part
    assert facts.shape is not None  # noqa: S101 - `decide` asked
    found = choose_formats(resolved, facts.shape, facts.choosable, facts.runtime)
    blind = plan_from_spec(deployment, defaults, facts)
    resources, resources_reason = replica_resources(deployment.spec, facts, candidate.gpus, candidate.tensor)
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
        resources=resources,
        memory=best.ledger,
        predicted=best.prediction,
        cost=best.cost,
        calibration=facts.calibration,
        requires=missing_capabilities(deployment, facts, candidate, speculation),
        rejected=(*speculation.rejected, *found.rejected, *choice.rejected),
        reasons=(
            *(one for one in blind.reasons if one.field in KEPT_REASONS),
            *placement_reasons(best, choice.rejected, resolved, deployment.spec.replicas),
            *rate_reasons(best),
            *calibration_reasons(best, facts.calibration),
            *found.reasons,
            *engine_reasons(resolved, best),
            speculation.reason,
            resources_reason,
            *facts.unknown,
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
        blind.engine.hybrid_kv_cache_manager,
    )


def _left_out(facts: Facts, search: Callable[[Facts], Choice | NoPlacement] | None) -> list[PlanReason]:
    """The nodes that do not count, one reason per group; with `search`, also what would include them."""
    groups = facts.inventory.refused if facts.inventory is not None else ()
    return reasons(verdicts(groups, facts, search)) if search is not None else plain_reasons(groups)


def _sentence(words: str) -> str:
    """With a capital, unless it starts with a field's name."""
    start = words if "." in words.split(" ", 1)[0] else f"{words[:1].upper()}{words[1:]}"
    return f"{start}."


def _decide_cpu(deployment: LLMDeployment, defaults: PlanDefaults, facts: Facts, *, explain: bool) -> Plan | Infeasible:
    """A CPU replica: the same plan as without facts, with its ledger, or what is short."""
    assert facts.shape is not None  # noqa: S101 - `decide` asked
    shape = as_loaded(deployment.spec, facts.shape, facts.runtime)
    draft = usable_draft_shape(deployment.spec, facts)
    if draft is not None and (problem := cpu_draft_problem(deployment.spec, shape, draft)) is not None:
        infeasible = Infeasible("speculation", _sentence(problem), input_hash(deployment))
        return _with_fixes(infeasible, deployment, defaults, facts) if explain else infeasible
    if (too_long := length_problem(deployment.spec, shape)) is not None:
        infeasible = Infeasible(Stage.MEMORY.constraint, _sentence(too_long), input_hash(deployment))
        return _with_fixes(infeasible, deployment, defaults, facts) if explain else infeasible
    memory = planned_cpu_memory(deployment.spec, shape, facts, draft)
    length = shortest_length(deployment.spec, shape)
    if memory.holds(length):
        blind = plan_from_spec(deployment, defaults, facts)
        pool = f"The KV pool holds {memory.kv_cache_tokens:,} tokens of the container's memory."
        replicas = deployment.spec.replicas
        return replace(
            blind,
            replicas=replicas,
            memory=memory.ledger,
            planned_model_len_tokens=planned_length(deployment.spec, shape, memory),
            reasons=(*blind.reasons, PlanReason("memory", pool)),
        )
    message = f"{_short_of_memory(memory, length, shape)}{_of_draft(memory, draft)}"
    infeasible = Infeasible("memory", message, input_hash(deployment))
    return _with_fixes(infeasible, deployment, defaults, facts) if explain else infeasible


def _short_of_memory(memory: CpuMemory, length: int, shape: ModelShape) -> str:
    """Say what has no room in a container that does not hold a request of `length` tokens."""
    ledger, weights = memory.ledger, _weights_in_words(shape)
    replica = f"A CPU replica with {ledger.usable_bytes >> 20} MiB of memory"
    missing = f"{(memory.limit_for(length) - ledger.usable_bytes) / (1 << 30):.1f} GiB are missing."
    if ledger.usable_bytes < ledger.context_bytes:
        return (
            f"{replica} (limits.memory) does not hold the runtime's own process, which takes "
            f"{ledger.context_bytes >> 20} MiB before any weight; with its {weights}, the largest step and {length} "
            f"tokens of KV cache {missing}"
        )
    return (
        f"{replica} has room for {max(0, memory.kv_cache_tokens)} tokens of KV cache next to its {weights} and "
        f"{ledger.activations_bytes >> 20} MiB for the largest step; {length} are wanted: {missing}"
    )


def _weights_in_words(shape: ModelShape) -> str:
    return f"{shape.dtype if shape.quantization is None else shape.quantization.method} weights"


def _of_draft(memory: CpuMemory, draft: ModelShape | None) -> str:
    """Say what the draft takes of the memory, so that a person sees what it costs."""
    if draft is None:
        return ""
    what, draft_bytes = "model" if draft.draft_head is None else "head", memory.ledger.draft_weights_bytes
    return f" The draft {what} takes {draft_bytes / (1 << 30):.1f} GiB for its weights."
