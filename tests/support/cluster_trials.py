"""What is wrong with the plan of a random cluster: one that cannot be applied beside one that can, a dear one, a fall.

rank 2    a plan that this version can apply
rank 1    no plan, and at least one fix
rank 0    neither: also a plan with `requires`, which is shown and never applied
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.fixes.change import edit
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from tests.support.gpu_nodes import gpu_node
from tests.support.infeasible_specs import PRODUCTS
from tests.support.random_clusters import RandomCluster

DEFAULTS = PlanDefaults("image")
SIZES = (1, 2, 4, 8)
OUTCOMES = ("nothing can be applied", "refused with fixes", "a plan")  # by rank


@dataclass(frozen=True)
class Trial:
    """`outcome`: of the cluster as it was drawn. `problems`: a line per broken rule."""

    outcome: str
    changes: int
    problems: list[str]


def try_cluster(cluster: RandomCluster) -> Trial:
    """Plan for the cluster, and for what each change makes of it."""
    found = decide(cluster.deployment, DEFAULTS, cluster.facts())
    where, problems, changes = f"cluster {cluster.number}, {cluster.model}", [], list(cluster.changes())
    if isinstance(found, Plan) and found.requires and (other := _applicable(cluster)) is not None:
        problems.append(f"{where}: {found.summary} requires {found.requires}, and there is {other}")
    if (cheaper := _cheaper_product(cluster, found)) is not None:
        problems.append(f"{where}: {_words(found)} is chosen, and {cheaper} is free and cheaper")
    for change, larger in changes:
        after = decide(larger.deployment, DEFAULTS, larger.facts())
        if rank(after) < rank(found):
            problems.append(f"{where}: {_words(found)}; with {change}: {_words(after)}")
    return Trial(OUTCOMES[rank(found)], len(changes), problems)


def rank(planned: Plan | Infeasible) -> int:
    if isinstance(planned, Plan):
        return 0 if planned.requires else 2
    return 1 if planned.fixes else 0


def _words(planned: Plan | Infeasible) -> str:
    if isinstance(planned, Plan):
        return f"{planned.summary}{f' requires {planned.requires}' if planned.requires else ''}"
    return f"{planned.message} Fixes: {[(fix.field, fix.value) for fix in planned.fixes]}"


def _applicable(cluster: RandomCluster) -> str | None:
    """A plan that this version can apply: of the same cluster with a size asked for, or with one node more."""
    facts = cluster.facts()
    pipeline = cluster.deployment.spec.parallelism.pipeline if cluster.deployment.spec.parallelism else None
    if (pipeline or 1) > 1:
        return None  # the spec itself insists on what this version cannot run
    for size in SIZES:
        asked = edit(cluster.deployment, facts, parallelism__tensor=size)
        if asked is not None and (plan := _applied(asked.deployment, facts)) is not None:
            return f"parallelism.tensor {size}: {plan.summary}"
    for product, counts in PRODUCTS.items():
        added = replace(cluster, nodes=(*cluster.nodes, gpu_node("node-added", product, max(counts))))
        if (plan := _applied(cluster.deployment, added.facts())) is not None:
            return f"one node more: {plan.summary}"
    return None


def _cheaper_product(cluster: RandomCluster, found: Plan | Infeasible) -> str | None:
    """A cheaper plan on the free GPUs of another product, with a context as long, where the spec names no products."""
    facts, accelerator = cluster.facts(), cluster.deployment.spec.accelerator
    if not isinstance(found, Plan) or found.waits or found.cost is None or (accelerator and accelerator.products):
        return None
    for product in sorted({kind.part.name for kind in facts.inventory.kinds} if facts.inventory else ()):
        only = edit(cluster.deployment, facts, accelerator__products=[product])
        other = _applied(only.deployment, facts) if only is not None else None
        if other is None or other.waits or other.cost is None:
            continue
        is_as_long = other.engine.max_model_len_tokens == found.engine.max_model_len_tokens
        if is_as_long and other.cost.monthly_usd < found.cost.monthly_usd:
            return other.summary
    return None


def _applied(deployment: LLMDeployment, facts: Facts) -> Plan | None:
    planned = decide(deployment, DEFAULTS, facts, explain=False)
    return planned if isinstance(planned, Plan) and not planned.requires else None
