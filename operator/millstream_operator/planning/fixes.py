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
from millstream_operator.catalog.gpu import MINIMUM_SM
from millstream_operator.inventory.node_kinds import Inventory, NodeKind, inventory_of
from millstream_operator.planning.candidates import P95_MARGIN, Outcome
from millstream_operator.planning.choice import Choice, Stopped
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import MAX_FIXES, Fix
from millstream_operator.planning.tensor_parallel import sizes, tensor_parallel_problem
from millstream_operator.planning.weights import weight_format
from millstream_operator.planning.wishes import wishes_of

SHORTEST_MODEL_LEN = 1024
MAX_SPARE = 8
Replan = Callable[[LLMDeployment, Facts], Choice | Stopped]


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that could be different."""

    field: str
    value: str
    deployment: LLMDeployment
    facts: Facts


def nearest_fixes(deployment: LLMDeployment, facts: Facts, stopped: Stopped, replan: Replan) -> tuple[Fix, ...]:
    """At most three changes that were planned again and found feasible: of different fields first."""
    found: list[Fix] = []
    spare: list[Change] = []  # more of a field that has a fix already
    for change in _changes(deployment, facts, stopped, replan):
        if len(found) == MAX_FIXES:
            return tuple(found)
        if change.field in {fix.field for fix in found}:
            spare.append(change)
        elif (fix := _proved(change, replan)) is not None:
            found.append(fix)
    for change in spare[:MAX_SPARE]:
        if len(found) < MAX_FIXES and (fix := _proved(change, replan)) is not None:
            found.append(fix)
    return tuple(found)


def _proved(change: Change, replan: Replan) -> Fix | None:
    choice = replan(change.deployment, change.facts)
    return Fix(change.field, change.value, described(choice.best)) if isinstance(choice, Choice) else None


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


def _changes(deployment: LLMDeployment, facts: Facts, stopped: Stopped, replan: Replan) -> Iterator[Change]:
    constraint = stopped.problem.stage.constraint

    def of_spec(path: str, value: Any) -> Change:
        return Change(path, str(value), with_field(deployment, path, value), facts)

    if constraint == "latency":
        yield from _looser_latency(deployment, facts, replan)
    if constraint == "budget":
        yield from _larger_budget(deployment, facts, replan)
    if constraint in ("parallelism", "memory"):
        yield from (of_spec("parallelism.tensor", size) for size in _other_tensors(deployment, facts))
    if constraint == "quantization" and facts.shape is not None and facts.shape.quantization is not None:
        yield of_spec("quantization.method", facts.shape.quantization.method)
    if constraint == "quantization":
        yield of_spec("quantization.method", "None")
        yield of_spec("quantization.kvCache", "None")
    if constraint == "speculation":
        yield Change("speculation.method", "NGram", _without_draft(deployment), replace(facts, draft_shape=None))
    if constraint in ("load", "inventory"):
        yield from (of_spec("replicas", count) for count in _fewer_replicas(deployment))
    if constraint == "memory":
        yield from (of_spec("engine.maxModelLen", length) for length in _shorter(deployment, facts))
        yield of_spec("engine.maxNumBatchedTokens", max(2048, _given_seqs(deployment)))
    if constraint in ("memory", "budget", "latency", "load", "inventory"):
        yield from (of_spec("quantization.method", method) for method in _fewer_bits(facts))
    yield from _more_gpus(deployment, facts)
    yield from _other_products(deployment, facts)


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
    if asked is None and deployment.spec.tier is None:
        return []  # it was the planner's to choose, and no size would do
    largest = max((kind.gpus for kind in inventory.kinds), default=1)
    method = shape.quantization.method if shape.quantization else "None"
    group = weight_format(shape, method).group_size
    allowed = [size for size in sizes(shape, largest) if tensor_parallel_problem(shape, size, group) is None]
    return sorted((size for size in allowed if size != asked), key=lambda size: (abs(size - (asked or 1)), size))


def _shorter(deployment: LLMDeployment, facts: Facts) -> Iterator[int]:
    if facts.shape is None:
        return
    length = wishes_of(deployment.spec, facts.shape).max_model_len // 2
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


def _more_gpus(deployment: LLMDeployment, facts: Facts) -> Iterator[Change]:
    """Twice the GPUs in a node, up to what such nodes have; then more nodes."""
    if facts.inventory is None or facts.inventory.hypothetical:
        return
    for kind in facts.inventory.kinds:
        gpus = kind.gpus
        while (gpus := gpus * 2) <= kind.part.gpus_per_node:
            yield Change("gpus", f"{kind.part.name}:{gpus}", deployment, _with_nodes(facts, kind, gpus, kind.nodes))
    for kind in facts.inventory.kinds:
        for factor in (2, 4, 8):
            nodes = kind.nodes * factor
            value = f"{nodes} nodes of {kind.part.name}:{kind.gpus}"
            yield Change("nodes", value, deployment, _with_nodes(facts, kind, kind.gpus, nodes))


def _with_nodes(facts: Facts, kind: NodeKind, gpus: int, nodes: int) -> Facts:
    return replace(facts, inventory=Inventory((NodeKind(kind.part, gpus, nodes),)))


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
