"""Other numbers of the spec: a shorter context, fewer replicas, less load, looser latencies, a larger budget.

Each is the one that changes least (`least_change.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from millstream_operator.api import duration
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.workload import Workload
from millstream_operator.planning.choices.evaluation import LOAD_HEADROOM, P95_MARGIN
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.change import Change, edit
from millstream_operator.planning.fixes.least_change import Replan, change_of, least
from millstream_operator.planning.plan import Plan
from millstream_operator.planning.resolved_spec import fewest_autoscaled, resolve_spec, wanted_replicas
from millstream_operator.planning.sizing.cost import monthly_usd

Changes = Iterator[Change | None]
SMALLEST_STEP_TOKENS = 2048
USUAL_UTILIZATION_PERCENT = 90


def shorter(deployment: LLMDeployment, facts: Facts, replan: Replan, shortest: int) -> Changes:
    """The longest context that fits; all that the model allows where the spec asks for more."""
    if facts.shape is None:
        return
    allowed, length = facts.shape.longest_context_tokens, resolve_spec(deployment.spec, facts.shape).max_model_len
    values = [allowed] if length > allowed else []
    values += [one for one in _round_lengths(min(allowed, length)) if one >= shortest]
    yield from least(values, length, lambda value: edit(deployment, facts, engine__maxModelLen=value), replan)


def _round_lengths(length: int) -> Iterator[int]:
    """Lengths below one, longest first: multiples of 1024, of 256 below 8192 and of 16 below 1024."""
    while length > 0:
        step = 1024 if length > 8192 else 256 if length > 1024 else 16
        length = (length - 1) // step * step
        yield length


def smaller_steps(deployment: LLMDeployment, facts: Facts, replan: Replan) -> Changes:
    """Fewer tokens per step, then more of the GPU's memory."""
    if facts.shape is None:
        return
    resolved = resolve_spec(deployment.spec, facts.shape)
    smallest = max(SMALLEST_STEP_TOKENS, resolved.max_num_seqs if resolved.max_num_seqs_is_given else 0)
    given = tokens = resolved.max_num_batched_tokens
    values: list[int] = []
    while tokens > smallest:
        tokens = max(tokens // 2, smallest)
        values.append(tokens)
    yield from least(values, given, lambda value: edit(deployment, facts, engine__maxNumBatchedTokens=value), replan)
    percent = resolved.gpu_memory_utilization_percent
    shares = range(percent + 1, USUAL_UTILIZATION_PERCENT + 1)
    yield from least(
        shares, percent, lambda value: edit(deployment, facts, engine__gpuMemoryUtilizationPercent=value), replan
    )


def fewer_replicas(deployment: LLMDeployment, facts: Facts, replan: Replan) -> Changes:
    """The most replicas that fit. Under autoscaling its limits bind, because it writes spec.replicas."""
    spec, scaling = deployment.spec, deployment.spec.autoscaling
    values = range(max(wanted_replicas(spec), fewest_autoscaled(spec)) - 1, 0, -1)
    if scaling is None:
        yield from least(values, spec.replicas, lambda value: edit(deployment, facts, replicas=value), replan)
        return

    def at_most(value: int) -> Change | None:
        at_least = {"autoscaling__minReplicas": value} if (scaling.min_replicas or 1) > value else {}
        return edit(deployment, facts, autoscaling__maxReplicas=value, **at_least)

    yield from least(values, scaling.max_replicas, at_most, replan)


def looser_latency(deployment: LLMDeployment, facts: Facts, replan: Replan) -> Changes:
    """The tightest latency that can be reached, as the objective, and that of a plan without: one, then both."""
    without = edit(deployment, facts, objectives=None)
    free = replan(without.deployment, facts) if without is not None else None
    objectives = deployment.spec.objectives
    if not isinstance(free, Plan) or free.predicted is None or objectives is None:
        return
    reached = {
        "ttft": int(free.predicted.ttft_milliseconds * P95_MARGIN) + 1,
        "itl": int(free.predicted.itl_microseconds * P95_MARGIN / 1000) + 1,
    }
    asked = {
        name: duration.milliseconds(one.p95)
        for name, one in (("ttft", objectives.ttft), ("itl", objectives.itl))
        if one
    }
    looser = {name: range(before + 1, reached[name] + 1) for name, before in asked.items() if before < reached[name]}
    for name, values in looser.items():
        yield from least(values, asked[name], _loosened(deployment, facts, name), replan)
    for name, values in looser.items():  # what the plan without objectives reaches: farther, and often cheaper
        if (change := _loosened(deployment, facts, name)(values[-1])) is not None:
            yield replace(change, step=change_of(asked[name], values[-1]))
    if len(looser) == 2:
        yield from _both(deployment, facts, asked, looser, replan)


def _loosened(deployment: LLMDeployment, facts: Facts, name: str) -> Callable[[int], Change | None]:
    return lambda value: edit(deployment, facts, **{f"objectives__{name}__p95": f"{value}ms"})


def _both(
    deployment: LLMDeployment, facts: Facts, asked: dict[str, int], looser: dict[str, range], replan: Replan
) -> Changes:
    """The tightest ITL with any TTFT, then the tightest TTFT with that ITL."""

    def both(itl: int) -> Callable[[int], Change | None]:
        return lambda ttft: edit(deployment, facts, objectives__ttft__p95=f"{ttft}ms", objectives__itl__p95=f"{itl}ms")

    slowest = looser["ttft"][-1]
    for found in least(looser["itl"], asked["itl"], lambda itl: both(itl)(slowest), replan):
        if found is not None:
            itl = duration.milliseconds(dict(found.fields)["objectives.itl.p95"])
            yield from least(looser["ttft"], asked["ttft"], both(itl), replan)


def less_load(deployment: LLMDeployment, facts: Facts, replan: Replan) -> Changes:
    """The load that the GPUs (and the budget) can carry."""
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
    if less and (change := edit(deployment, facts, **less)) is not None:
        yield replace(change, step=max(change_of(asked[name] or 1, most) for name, most in less.items()))


def _most_replicas(plan: Plan, deployment: LLMDeployment, facts: Facts) -> int:
    """The replicas of a plan that the GPUs have room for and an enforced budget pays."""
    everything = facts.capacity or facts.inventory
    of_part = (stock for stock in (everything.stocks() if everything else ()) if stock.part.name == plan.product)
    room = sum(stock.groups(plan.tensor_parallel_size) for stock in of_part) // plan.pipeline_parallel_size
    budget = deployment.spec.budget
    if budget is None or plan.cost is None or not plan.replicas:
        return room
    each = monthly_usd(plan.cost.hourly_milli_usd / plan.replicas, 1)
    return min(room, budget.max_monthly_usd // (each + 1))


def larger_budget(deployment: LLMDeployment, facts: Facts, replan: Replan) -> Changes:
    """The smallest budget with a plan; under autoscaling the one that pays for autoscaling.maxReplicas too."""
    budget, scaling = deployment.spec.budget, deployment.spec.autoscaling
    without = edit(deployment, facts, budget=None)
    free = replan(without.deployment, facts) if without is not None else None
    if budget is None or not isinstance(free, Plan) or (usd := planned_monthly_usd(free, deployment)) is None:
        return

    def up_to(value: int) -> Change | None:
        return edit(deployment, facts, budget__maxMonthlyUSD=value)

    if scaling is None:
        yield from least(range(budget.max_monthly_usd + 1, usd + 1), budget.max_monthly_usd, up_to, replan)
        return
    most = monthly_usd(_hourly_milli_usd(free), max(free.replicas or 1, scaling.max_replicas))
    if (change := up_to(max(most, usd))) is not None:
        yield replace(change, step=change_of(budget.max_monthly_usd, most))


def planned_monthly_usd(plan: Plan, deployment: LLMDeployment) -> int | None:
    """What a budget must pay for a plan: the replicas that the load needs, or those of the spec where they are more."""
    if plan.cost is None or not plan.replicas:
        return None
    return monthly_usd(_hourly_milli_usd(plan), max(plan.replicas, wanted_replicas(deployment.spec)))


def _hourly_milli_usd(plan: Plan) -> float:
    """Of one replica."""
    return plan.cost.hourly_milli_usd / (plan.replicas or 1) if plan.cost is not None else 0.0
