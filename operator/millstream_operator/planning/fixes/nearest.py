"""The nearest changes that make an infeasible spec feasible, each proved by planning again with it.

Nearest means: first what costs nothing but length, then what costs quality, then what costs money. A change that does
not help is not mentioned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.workload import Tier
from millstream_operator.catalog.gpu import MINIMUM_SM
from millstream_operator.inventory.node_kinds import Inventory, NodeKind, inventory_of
from millstream_operator.planning.choices.candidates import P95_MARGIN, Outcome
from millstream_operator.planning.choices.placement import Choice, NoPlacement
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import MAX_FIXES, Fix
from millstream_operator.planning.resolved_spec import resolve_spec
from millstream_operator.planning.sizing.tensor_parallel import sizes, tensor_parallel_problem
from millstream_operator.planning.sizing.weights import weight_format

SHORTEST_MODEL_LEN = 1024
MAX_TRIES, MAX_SPARE_TRIES = 16, 6  # plans; each takes a millisecond or two
Replan = Callable[[LLMDeployment, Facts], Choice | NoPlacement]


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that could be different."""

    field: str
    value: str
    deployment: LLMDeployment
    facts: Facts


def nearest_fixes(deployment: LLMDeployment, facts: Facts, stopped: NoPlacement, replan: Replan) -> tuple[Fix, ...]:
    """At most three changes that were planned again and found feasible: of different fields first."""
    found: list[Fix] = []
    spare: list[Change] = []  # more of a field that has a fix already
    tries = 0
    for change in _changes(deployment, facts, stopped, replan):
        if len(found) == MAX_FIXES or tries == MAX_TRIES:
            break
        if change.field in {fix.field for fix in found}:
            spare.append(change)
            continue
        tries += 1
        if (fix := _proved(change, replan)) is not None:
            found.append(fix)
    for change in spare[:MAX_SPARE_TRIES]:
        if len(found) < MAX_FIXES and (fix := _proved(change, replan)) is not None:
            found.append(fix)
    return tuple(found)


def _proved(change: Change, replan: Replan) -> Fix | None:
    choice = replan(change.deployment, change.facts)
    if not isinstance(choice, Choice):
        return None
    if change.field == "parallelism.tensor" and choice.best.candidate.pipeline > 1:
        return None  # it would be the stages that help, not the size
    return Fix(change.field, change.value, described(choice.best))


def described(outcome: Outcome) -> str:
    """`2×A100-80GB TP2 None, $5,009 a month`."""
    cost = f", ${outcome.cost.monthly_usd:,} a month" if outcome.cost else ""
    replicas = f"{outcome.replicas} × " if outcome.replicas > 1 else ""
    return f"{replicas}{outcome.candidate.summary}{cost}"


def with_field(deployment: LLMDeployment, path: str, value: Any) -> LLMDeployment:
    """A copy with one field of the spec set, or taken away where `value` is None."""
    spec = deployment.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    *parents, last = path.split(".")
    place = spec
    for step in parents:
        place = place.setdefault(step, {})
    if value is None:
        place.pop(last, None)
    else:
        place[last] = value
    changed = type(deployment.spec).model_validate_json(json.dumps(spec))
    return deployment.model_copy(update={"spec": changed})


def _changes(deployment: LLMDeployment, facts: Facts, stopped: NoPlacement, replan: Replan) -> Iterator[Change]:
    """Everything that may help, nearest first: the field that binds, then fewer bits, then more or other GPUs."""
    constraint = stopped.problem.stage.constraint
    if constraint == "latency":
        yield from _looser_latency(deployment, facts, replan)
    if constraint == "budget":
        yield from _larger_budget(deployment, facts, replan)
    if constraint == "products":
        yield from _present_products(deployment, facts)
    for path, value in _of_spec(constraint, deployment, facts):
        yield Change(path, _shown(value), with_field(deployment, path, value), facts)
    if constraint == "speculation":
        yield Change("speculation.method", "NGram", _without_draft(deployment), replace(facts, draft_shape=None))
    yield from _more_gpus(constraint, deployment, facts)
    yield from _other_products(deployment, facts)


def _of_spec(constraint: str, deployment: LLMDeployment, facts: Facts) -> Iterator[tuple[str, Any]]:
    """Fields of the spec and other values for them; None takes a field away."""
    if deployment.spec.tier is Tier.STARTUP:
        yield "tier", Tier.MID.value
    if constraint in ("parallelism", "memory"):
        yield from (("parallelism.tensor", size) for size in _other_tensors(deployment, facts))
    if constraint == "parallelism":
        yield from (("quantization.method", method) for method in _other_formats(facts))
        yield "parallelism", None
    if constraint == "quantization":
        yield from (("quantization.method", method) for method in _other_formats(facts))
        yield "quantization.kvCache", "None"
    if constraint in ("load", "inventory"):
        yield from (("replicas", count) for count in _fewer_replicas(deployment))
    if constraint == "memory":
        yield from (("engine.maxModelLen", length) for length in _shorter(deployment, facts))
        yield "engine.maxNumBatchedTokens", max(2048, _given_seqs(deployment))
    if constraint in ("memory", "budget", "latency", "load", "inventory"):
        yield from (("quantization.method", method) for method in _fewer_bits(facts))


def _shown(value: Any) -> str:
    return "absent" if value is None else str(value)


def _other_formats(facts: Facts) -> list[str]:
    """The checkpoint's own where it is quantised, else those without groups that a shard could cut."""
    if facts.shape is not None and facts.shape.quantization is not None:
        return [facts.shape.quantization.method]
    return ["None", "INT8"]


def _looser_latency(deployment: LLMDeployment, facts: Facts, replan: Replan) -> Iterator[Change]:
    """What the free choice is predicted to reach becomes the objective."""
    free = replan(with_field(deployment, "objectives", None), facts)
    if not isinstance(free, Choice) or free.best.prediction is None or deployment.spec.objectives is None:
        return
    prediction = free.best.prediction
    reached = {
        "ttft": prediction.ttft_milliseconds * P95_MARGIN,
        "itl": prediction.itl_microseconds * P95_MARGIN / 1000,
    }
    for name, milliseconds in reached.items():
        if getattr(deployment.spec.objectives, name) is not None:
            value = f"{int(milliseconds) + 1}ms"
            path = f"objectives.{name}.p95"
            yield Change(path, value, with_field(deployment, path, value), facts)


def _larger_budget(deployment: LLMDeployment, facts: Facts, replan: Replan) -> Iterator[Change]:
    free = replan(with_field(deployment, "budget", None), facts)
    if isinstance(free, Choice) and free.best.cost is not None:
        usd = free.best.cost.monthly_usd
        path = "budget.maxMonthlyUSD"
        yield Change(path, str(usd), with_field(deployment, path, usd), facts)


def _other_tensors(deployment: LLMDeployment, facts: Facts) -> list[int]:
    """Sizes that the model allows, nearest to the one that the spec gives; for Startup the next ones above one."""
    shape, inventory = facts.shape, facts.inventory
    if shape is None or inventory is None:
        return []
    asked = deployment.spec.parallelism.tensor if deployment.spec.parallelism else None
    if asked is None and deployment.spec.tier is not Tier.STARTUP:
        return []  # it was the planner's to choose, and no size would do
    largest = max((kind.gpus for kind in inventory.kinds), default=1)
    method = shape.quantization.method if shape.quantization else "None"
    group = weight_format(shape, method).group_size
    allowed = [size for size in sizes(shape, largest) if tensor_parallel_problem(shape, size, group) is None]
    return sorted((size for size in allowed if size != asked), key=lambda size: (abs(size - (asked or 1)), size))


def _shorter(deployment: LLMDeployment, facts: Facts) -> Iterator[int]:
    if facts.shape is None:
        return
    length = resolve_spec(deployment.spec, facts.shape).max_model_len // 2
    while length >= SHORTEST_MODEL_LEN:
        yield length
        length //= 2


def _given_seqs(deployment: LLMDeployment) -> int:
    return (deployment.spec.engine.max_num_seqs if deployment.spec.engine else None) or 0


def _fewer_bits(facts: Facts) -> list[str]:
    """FP8 where a GPU has it, then 4 bit; a quantised checkpoint has only its own."""
    if facts.shape is None or facts.shape.quantization is not None or facts.inventory is None:
        return []
    newest = max((kind.part.sm for kind in facts.inventory.kinds), default=0)
    return [method for method in ("FP8", "AWQ") if newest >= MINIMUM_SM[method]]


def _fewer_replicas(deployment: LLMDeployment) -> Iterator[int]:
    count = deployment.spec.replicas - 1
    while count >= 1:
        yield count
        count //= 2


def _without_draft(deployment: LLMDeployment) -> LLMDeployment:
    return with_field(with_field(deployment, "speculation", None), "speculation.method", "NGram")


def _more_gpus(constraint: str, deployment: LLMDeployment, facts: Facts) -> Iterator[Change]:
    """Twice the GPUs in a node, up to what such nodes have; then more nodes, which hold more but are no faster."""
    if facts.inventory is None or facts.inventory.hypothetical:
        return
    largest = [max(stock.kinds, key=lambda kind: (kind.gpus, kind.nodes)) for stock in facts.inventory.stocks()]
    for kind in largest:
        gpus = kind.gpus
        while (gpus := gpus * 2) <= kind.part.gpus_per_node:
            yield Change("gpus", f"{kind.part.name}:{gpus}", deployment, _with_nodes(facts, kind, gpus, kind.nodes))
    for kind in largest if constraint in ("memory", "load", "inventory") else ():
        for factor in (2, 4, 8):
            nodes = kind.nodes * factor
            value = f"{nodes} nodes of {kind.part.name}:{kind.gpus}"
            yield Change("nodes", value, deployment, _with_nodes(facts, kind, kind.gpus, nodes))


def _with_nodes(facts: Facts, kind: NodeKind, gpus: int, nodes: int) -> Facts:
    return replace(facts, inventory=Inventory((NodeKind(kind.part, gpus, nodes),)))


def _present_products(deployment: LLMDeployment, facts: Facts) -> Iterator[Change]:
    """GPUs that are there, for a spec that names others."""
    stocks = facts.inventory.stocks() if facts.inventory is not None else ()
    for stock in sorted(stocks, key=lambda stock: (stock.part.hourly_milli_usd, stock.part.name)):
        path, names = "accelerator.products", [stock.part.name]
        yield Change(path, stock.part.name, with_field(deployment, path, names), facts)


def _other_products(deployment: LLMDeployment, facts: Facts) -> Iterator[Change]:
    """A GPU that the inventory lacks: as many as it has now, the cheapest first."""
    if facts.inventory is None:
        return
    present = {kind.part.name for kind in facts.inventory.kinds}
    count = max((kind.gpus for kind in facts.inventory.kinds), default=1)
    nodes = max((kind.nodes for kind in facts.inventory.kinds), default=1)
    others = [part for part in facts.catalog if part.unsupported is None and part.name not in present]
    freed = with_field(deployment, "accelerator.products", None)
    for part in sorted(others, key=lambda part: (part.hourly_milli_usd, part.name)):
        gpus = min(count, part.gpus_per_node)
        other = replace(facts, inventory=inventory_of([(part, gpus)] * min(nodes, 64)))
        yield Change("accelerator.products", f"{part.name}:{gpus}", freed, other)
