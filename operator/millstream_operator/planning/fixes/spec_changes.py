"""Edits of the spec that may lift a constraint: the field that binds first, then what costs quality, then money."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.optimization import Parallelism, Quantization
from millstream_operator.api.spec import Accelerator, AcceleratorType
from millstream_operator.api.workload import Tier, Workload
from millstream_operator.catalog.gpu import MINIMUM_SM
from millstream_operator.inventory.node_kinds import Inventory
from millstream_operator.planning.choices.evaluation import LOAD_HEADROOM, P95_MARGIN
from millstream_operator.planning.choices.speculation import choose_speculation
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.change import Change, edit
from millstream_operator.planning.plan import Infeasible, Plan
from millstream_operator.planning.resolved_spec import resolve_spec
from millstream_operator.planning.sizing.cost import monthly_usd
from millstream_operator.planning.sizing.tensor_parallel import sizes, tensor_parallel_problem
from millstream_operator.planning.sizing.weights import weight_format

SHORTEST_MODEL_LEN = 1024
Replan = Callable[[LLMDeployment, Facts], Plan | Infeasible]


def spec_changes(constraint: str, deployment: LLMDeployment, facts: Facts, replan: Replan) -> Iterator[Change]:
    """Yield the edits that may lift a constraint, nearest first. Whether one does, planning again says."""
    if (deployment.spec.accelerator or Accelerator()).type is AcceleratorType.CPU:
        yield from _given(_shorter(deployment, facts, shortest=16))
        return
    yield from _given(_for_constraint(constraint, deployment, facts, replan))
    if deployment.spec.tier is Tier.STARTUP:
        yield from _given(iter([edit(deployment, facts, tier=Tier.MID.value)]))
    if constraint in ("memory", "budget", "latency", "load", "inventory"):
        yield from _given(edit(deployment, facts, quantization__method=method) for method in _fewer_bits(facts))


def without_unsupported(deployment: LLMDeployment, facts: Facts) -> Change | None:
    """The edit that takes away what the spec asks for and the runtime lacks; None where it lacks nothing of it."""
    spec, runtime = deployment.spec, facts.runtime
    gone: dict[str, None] = {}
    quantization, parallelism = spec.quantization or Quantization(), spec.parallelism or Parallelism()
    stored = facts.shape.quantization.method if facts.shape is not None and facts.shape.quantization else "None"
    if quantization.method not in (None, "Auto", stored):
        gone["quantization__method"] = None
    if quantization.kv_cache not in (None, "Auto", *runtime.kv_cache_methods):
        gone["quantization__kvCache"] = None
    if (
        spec.speculation is not None
        and choose_speculation(spec, runtime).plan.method not in runtime.speculation_methods
    ):
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
    if constraint == "products":
        yield from _present_products(deployment, facts)
    if constraint == "latency":
        yield from _looser_latency(deployment, facts, replan)
    if constraint in ("load", "inventory", "budget"):
        yield from _less_load(deployment, facts, replan)
        yield from (edit(deployment, facts, replicas=count) for count in _fewer_replicas(deployment))
    if constraint == "budget":
        yield from _larger_budget(deployment, facts, replan)
    if constraint == "memory":
        yield from _shorter(deployment, facts, SHORTEST_MODEL_LEN)
        tokens = max(2048, _given_seqs(deployment))
        yield edit(deployment, facts, engine__maxNumBatchedTokens=tokens)
        yield edit(deployment, facts, engine__gpuMemoryUtilizationPercent=90)
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
    """Yield the GPUs that are there, the cheapest first, for a spec that names others."""
    for stock in sorted(_all_gpus(facts).stocks(), key=lambda stock: (stock.part.hourly_milli_usd, stock.part.name)):
        yield edit(deployment, facts, accelerator__products=[stock.part.name])


def _looser_latency(deployment: LLMDeployment, facts: Facts, replan: Replan) -> Iterator[Change | None]:
    """Yield the latency that a plan without objectives is predicted to reach, as the objective: one, then both."""
    without = edit(deployment, facts, objectives=None)
    free = replan(without.deployment, facts) if without is not None else None
    if not isinstance(free, Plan) or free.predicted is None or deployment.spec.objectives is None:
        return
    reached = {
        "ttft": free.predicted.ttft_milliseconds * P95_MARGIN,
        "itl": free.predicted.itl_microseconds * P95_MARGIN / 1000,
    }
    values = {
        f"objectives__{name}__p95": f"{int(milliseconds) + 1}ms"
        for name, milliseconds in reached.items()
        if getattr(deployment.spec.objectives, name) is not None
    }
    for name, value in values.items():
        yield edit(deployment, facts, **{name: value})
    if len(values) > 1:
        yield edit(deployment, facts, **values)


def _larger_budget(deployment: LLMDeployment, facts: Facts, replan: Replan) -> Iterator[Change | None]:
    """Yield what the plan without a budget costs, as the budget."""
    without = edit(deployment, facts, budget=None)
    free = replan(without.deployment, facts) if without is not None else None
    if isinstance(free, Plan) and (usd := planned_monthly_usd(free, deployment)) is not None:
        yield edit(deployment, facts, budget__maxMonthlyUSD=usd)


def planned_monthly_usd(plan: Plan, deployment: LLMDeployment) -> int | None:
    """What a budget must pay for a plan: the replicas that the load needs, or those of the spec where they are more."""
    if plan.cost is None or not plan.replicas:
        return None
    return monthly_usd(plan.cost.hourly_milli_usd / plan.replicas, max(plan.replicas, deployment.spec.replicas))


def _less_load(deployment: LLMDeployment, facts: Facts, replan: Replan) -> Iterator[Change | None]:
    """Yield the load that the GPUs (and the budget) can carry."""
    workload = deployment.spec.workload or Workload()
    if workload.requests_per_minute is None and workload.concurrency is None:
        return
    without = edit(deployment, facts, workload__requestsPerMinute=None, workload__concurrency=None, budget=None)
    free = replan(without.deployment, facts) if without is not None else None
    if not isinstance(free, Plan) or free.predicted is None:
        return
    replicas = _most_replicas(free, deployment, facts)
    carried = {
        "workload__requestsPerMinute": replicas * int(free.predicted.requests_per_minute * LOAD_HEADROOM),
        "workload__concurrency": replicas * free.predicted.concurrent_sequences,
    }
    asked = {"workload__requestsPerMinute": workload.requests_per_minute, "workload__concurrency": workload.concurrency}
    less = {name: most for name, most in carried.items() if (wanted := asked[name]) is not None and 0 < most < wanted}
    if less:
        yield edit(deployment, facts, **less)


def _most_replicas(plan: Plan, deployment: LLMDeployment, facts: Facts) -> int:
    """The replicas of a plan that the GPUs have room for and an enforced budget pays."""
    of_part = (stock for stock in _all_gpus(facts).stocks() if stock.part.name == plan.product)
    room = sum(stock.groups(plan.tensor_parallel_size) for stock in of_part) // plan.pipeline_parallel_size
    budget = deployment.spec.budget
    if budget is None or plan.cost is None or not plan.replicas:
        return room
    each = monthly_usd(plan.cost.hourly_milli_usd / plan.replicas, 1)
    return min(room, budget.max_monthly_usd // (each + 1))


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


def _shorter(deployment: LLMDeployment, facts: Facts, shortest: int) -> Iterator[Change | None]:
    """Yield half of maxModelLen and so on; first all that the model allows where the spec asks for more."""
    if facts.shape is None:
        return
    allowed, length = facts.shape.max_position_embeddings, resolve_spec(deployment.spec, facts.shape).max_model_len
    if length > allowed:
        yield edit(deployment, facts, engine__maxModelLen=allowed)
    length = min(allowed, length) // 2
    while length >= shortest:
        yield edit(deployment, facts, engine__maxModelLen=length)
        length //= 2


def _given_seqs(deployment: LLMDeployment) -> int:
    return (deployment.spec.engine.max_num_seqs if deployment.spec.engine else None) or 0


def _fewer_bits(facts: Facts) -> list[str]:
    """FP8 where a GPU has it, then 4 bit; a quantised checkpoint has only its own."""
    if facts.shape is None or facts.shape.quantization is not None:
        return []
    newest = max((kind.part.sm for kind in _all_gpus(facts).kinds), default=0)
    return [method for method in ("FP8", "AWQ") if newest >= MINIMUM_SM[method]]


def _fewer_replicas(deployment: LLMDeployment) -> Iterator[int]:
    count = deployment.spec.replicas - 1
    while count >= 1:
        yield count
        count = min(count - 1, count * 3 // 4)


def _all_gpus(facts: Facts) -> Inventory:
    return facts.capacity or facts.inventory or Inventory(())
