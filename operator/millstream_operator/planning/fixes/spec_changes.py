"""Edits of the spec that may lift a constraint; `nearness.py` says in which order they are offered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.optimization import Parallelism, Quantization
from millstream_operator.api.spec import Accelerator, AcceleratorType
from millstream_operator.api.workload import Tier
from millstream_operator.catalog.gpu import MINIMUM_SM
from millstream_operator.inventory.node_kinds import Inventory
from millstream_operator.planning.choices.quantization import is_plain_gguf
from millstream_operator.planning.choices.rounded_weights import is_rounded
from millstream_operator.planning.choices.speculation import choose_speculation
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.change import Change, edit
from millstream_operator.planning.fixes.cpu_changes import memory_changes
from millstream_operator.planning.fixes.least_change import Replan
from millstream_operator.planning.fixes.number_changes import (
    fewer_replicas,
    larger_budget,
    less_load,
    looser_latency,
    shorter,
    smaller_steps,
)
from millstream_operator.planning.requires import draft_source, missing_for_speculation
from millstream_operator.planning.sizing.tensor_parallel import sizes, tensor_parallel_problem
from millstream_operator.planning.sizing.weights import weight_format

SHORTEST_MODEL_LEN = 1024


def spec_changes(constraint: str, deployment: LLMDeployment, facts: Facts, replan: Replan) -> Iterator[Change]:
    """Yield the edits that may lift a constraint. Whether one does, planning again says."""
    if (deployment.spec.accelerator or Accelerator()).type is AcceleratorType.CPU:
        if constraint == "memory":
            yield from memory_changes(deployment, facts)
            yield from _given(shorter(deployment, facts, replan, shortest=16))
        if constraint == "quantization":
            yield from _given(edit(deployment, facts, quantization__method=method) for method in _other_formats(facts))
        if constraint == "speculation" or (constraint == "memory" and draft_source(deployment.spec) is not None):
            yield from _given(_without_draft(deployment, facts, method) for method in ("NGram", "Disabled"))
        return
    yield from _given(_for_constraint(constraint, deployment, facts, replan))
    yield from _given(_present_products(deployment, facts))
    if deployment.spec.tier is Tier.STARTUP:
        yield from _given(iter([edit(deployment, facts, tier=Tier.MID.value)]))
    if constraint in ("memory", "budget", "latency", "load", "inventory"):
        yield from _given(edit(deployment, facts, quantization__method=method) for method in _fewer_bits(facts))


def without_unsupported(deployment: LLMDeployment, facts: Facts) -> Change | None:
    """The edit that takes away what the spec asks for and the runtime lacks; None where it lacks nothing of it."""
    spec, runtime = deployment.spec, facts.runtime
    gone: dict[str, None] = {}
    quantization, parallelism = spec.quantization or Quantization(), spec.parallelism or Parallelism()
    stored = facts.shape.quantization if facts.shape is not None else None
    asked = quantization.method
    is_stored = asked == "None" if stored is None else asked is not None and stored.may_be(asked)
    if facts.shape is not None:
        is_stored = is_stored or is_plain_gguf(asked or "Auto", facts.shape) or is_rounded(spec, facts.shape, runtime)
    if quantization.calibration is None and asked not in (None, "Auto") and not is_stored:
        gone["quantization__method"] = None
    on_cpu = (spec.accelerator or Accelerator()).type is AcceleratorType.CPU
    kv_cache_methods = runtime.cpu_kv_cache_methods if on_cpu else runtime.kv_cache_methods
    if quantization.kv_cache not in (None, "Auto", *kv_cache_methods):
        gone["quantization__kvCache"] = None
    if spec.speculation is not None:
        method = choose_speculation(spec, runtime).plan.method
        if missing_for_speculation(spec, runtime, method):
            gone["speculation"] = None
    if (parallelism.pipeline or 1) > runtime.max_pipeline_parallel_size:
        gone["parallelism"] = None
    elif (parallelism.tensor or 1) > runtime.max_tensor_parallel_size:
        gone["parallelism__tensor"] = None
    known = replace(facts, draft_shape=None) if "speculation" in gone else facts
    return edit(deployment, known, **gone) if gone else None


def _given(changes: Iterator[Change | None]) -> Iterator[Change]:
    return (change for change in changes if change is not None)


def _for_constraint(
    constraint: str, deployment: LLMDeployment, facts: Facts, replan: Replan
) -> Iterator[Change | None]:
    """Yield the edits of the fields that bind."""
    if constraint == "latency":
        yield from looser_latency(deployment, facts, replan)
    if constraint in ("load", "inventory", "budget"):
        yield from less_load(deployment, facts, replan)
        yield from fewer_replicas(deployment, facts, replan)
    if constraint == "budget":
        yield from larger_budget(deployment, facts, replan)
    if constraint == "memory":
        yield from shorter(deployment, facts, replan, SHORTEST_MODEL_LEN)
        yield from smaller_steps(deployment, facts, replan)
    if constraint in ("parallelism", "memory"):
        yield from (edit(deployment, facts, parallelism__tensor=size) for size in _other_tensors(deployment, facts))
        if deployment.spec.parallelism is not None:
            yield edit(deployment, facts, parallelism=None)
    if constraint in ("parallelism", "quantization"):
        yield from (edit(deployment, facts, quantization__method=method) for method in _other_formats(facts))
    if constraint == "quantization":
        yield edit(deployment, facts, quantization__kvCache="None")
    if constraint == "speculation":
        yield from (_without_draft(deployment, facts, method) for method in ("NGram", "Disabled"))


def _present_products(deployment: LLMDeployment, facts: Facts) -> Iterator[Change | None]:
    """Yield the GPUs that are there, the cheapest first, for a spec that names others or too few."""
    named = (deployment.spec.accelerator or Accelerator()).products
    if not named:
        return
    for stock in sorted(_all_gpus(facts).stocks(), key=lambda stock: (stock.part.hourly_milli_usd, stock.part.name)):
        if [stock.part.name] != named:
            yield edit(deployment, facts, accelerator__products=[stock.part.name])


def _without_draft(deployment: LLMDeployment, facts: Facts, method: str) -> Change | None:
    changed = edit(deployment, replace(facts, draft_shape=None), speculation={"method": method})
    return replace(changed, fields=(("speculation.method", method),)) if changed is not None else None


def _other_formats(facts: Facts) -> list[str]:
    """The checkpoint's own where it is quantised, else those without groups that a shard could cut."""
    if facts.shape is not None and facts.shape.quantization is not None:
        return [facts.shape.quantization.method]
    return ["None", "INT8"]


def _other_tensors(deployment: LLMDeployment, facts: Facts) -> list[int]:
    """Sizes that the model allows, nearest to the one that the spec gives; for Startup the next ones above one."""
    shape = facts.shape
    if shape is None:
        return []
    asked = deployment.spec.parallelism.tensor if deployment.spec.parallelism else None
    if asked is None and deployment.spec.tier is not Tier.STARTUP:
        return []  # it was the planner's to choose, and no size would do
    largest = max((kind.gpus for kind in _all_gpus(facts).kinds), default=1)
    method = shape.quantization.method if shape.quantization else "None"
    group = weight_format(shape, method).group_size
    allowed = [size for size in sizes(shape, largest) if tensor_parallel_problem(shape, size, group) is None]
    return sorted((size for size in allowed if size != asked), key=lambda size: (abs(size - (asked or 1)), size))


def _fewer_bits(facts: Facts) -> list[str]:
    """FP8 where a GPU has it, then 4 bit; a quantised checkpoint has only its own."""
    if facts.shape is None or facts.shape.quantization is not None:
        return []
    newest = max((kind.part.sm for kind in _all_gpus(facts).kinds), default=0)
    return [method for method in ("FP8", "AWQ") if newest >= MINIMUM_SM[method]]


def _all_gpus(facts: Facts) -> Inventory:
    return facts.capacity or facts.inventory or Inventory(())
