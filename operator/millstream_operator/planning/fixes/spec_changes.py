"""Changes of the spec that may lift a constraint: the field that binds first, then fewer bits per weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.workload import Tier
from millstream_operator.catalog.gpu import MINIMUM_SM
from millstream_operator.planning.choices.evaluation import P95_MARGIN
from millstream_operator.planning.choices.placement import Choice, NoPlacement
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.change import Change, with_field
from millstream_operator.planning.resolved_spec import resolve_spec
from millstream_operator.planning.sizing.tensor_parallel import sizes, tensor_parallel_problem
from millstream_operator.planning.sizing.weights import weight_format

SHORTEST_MODEL_LEN = 1024
Replan = Callable[[LLMDeployment, Facts], Choice | NoPlacement]


def spec_changes(constraint: str, deployment: LLMDeployment, facts: Facts) -> Iterator[Change]:
    """Yield other values for fields of the spec, for any constraint that needs no second plan to find them."""
    for path, value in _other_values(constraint, deployment, facts):
        yield Change(path, "absent" if value is None else str(value), with_field(deployment, path, value), facts)
    if constraint == "speculation":
        without_draft = with_field(with_field(deployment, "speculation", None), "speculation.method", "NGram")
        yield Change("speculation.method", "NGram", without_draft, replace(facts, draft_shape=None))


def _other_values(constraint: str, deployment: LLMDeployment, facts: Facts) -> Iterator[tuple[str, Any]]:
    """Yield fields of the spec and other values for them; None removes the field."""
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


def looser_latency(deployment: LLMDeployment, facts: Facts, replan: Replan) -> Iterator[Change]:
    """Yield the latency that a plan without objectives is predicted to reach, as the objective."""
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


def larger_budget(deployment: LLMDeployment, facts: Facts, replan: Replan) -> Iterator[Change]:
    free = replan(with_field(deployment, "budget", None), facts)
    if isinstance(free, Choice) and free.best.cost is not None:
        usd = free.best.cost.monthly_usd
        path = "budget.maxMonthlyUSD"
        yield Change(path, str(usd), with_field(deployment, path, usd), facts)


def _other_formats(facts: Facts) -> list[str]:
    """The checkpoint's own where it is quantised, else those without groups that a shard could cut."""
    if facts.shape is not None and facts.shape.quantization is not None:
        return [facts.shape.quantization.method]
    return ["None", "INT8"]


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
