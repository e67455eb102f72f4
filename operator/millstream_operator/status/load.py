"""The condition `InsufficientReplicas`: the load of the spec is predicted to need more replicas than it asks for. Pure.

The operator never writes spec.replicas: the API server defaults it to 1, so an absent field looks like a wish for one.
"""

from __future__ import annotations

from millstream_operator.api.workload import Workload
from millstream_operator.diagnosis.conditions import INSUFFICIENT_REPLICAS, Condition
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.planning.scaling_cost import replica_hourly_milli_usd, replicas_for_load
from millstream_operator.planning.sizing.cost import monthly_usd
from millstream_operator.status.observation import Observation


def insufficient_replicas(observation: Observation) -> Condition | None:
    """Return the condition; None where the replicas do, none is wanted, or an autoscaler may add as many."""
    owner, plan = observation.owner, observation.revision.plan
    needed, spec = replicas_for_load(plan, owner.spec), owner.spec
    wanted = spec.replicas if observation.asked_replicas is None else observation.asked_replicas
    most = max(wanted, spec.autoscaling.max_replicas if spec.autoscaling is not None else 0)
    if needed is None or needed <= most or wanted == 0:
        return None
    each = replica_hourly_milli_usd(plan)
    cost = f" (${monthly_usd(each, needed):,} a month)" if each is not None else ""
    place = f" -n {owner.metadata.namespace}" if owner.metadata.namespace else ""
    do = f"kubectl scale llmd {owner.name}{place} --replicas={needed}"
    has = f"spec.replicas is {wanted}: {do}."
    if spec.autoscaling is not None:
        has = f"autoscaling.maxReplicas is {spec.autoscaling.max_replicas}: raise it to {needed}."
    message = (
        f"{_words(spec.workload or Workload())} is predicted to need {needed} replicas{cost}, each 80 % busy; {has}"
    )
    return Condition(INSUFFICIENT_REPLICAS, True, Reason.LOAD_NEEDS_MORE_REPLICAS, message)


def _words(workload: Workload) -> str:
    """`The load (requestsPerMinute 900, concurrency 50)`."""
    given = {"requestsPerMinute": workload.requests_per_minute, "concurrency": workload.concurrency}
    return f"The load ({', '.join(f'{name} {value}' for name, value in given.items() if value is not None)})"
