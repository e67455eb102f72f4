"""Resources of one container: what the plan gives it, with what podTemplate says over it. Pure.

named in requests and limits    both are podTemplate's
named in requests alone         the planned limit stays, or is raised to the request
named in limits alone           Kubernetes takes the limit as the request, too
"""

from __future__ import annotations

from typing import Any

from millstream_operator.api.pod_template import ResourceList, ResourceRequirements
from millstream_operator.api.quantity import amount, canonical
from millstream_operator.planning.plan import ResourcePlan


def container_resources(planned: ResourcePlan, given: ResourceRequirements | None) -> dict[str, Any]:
    """Return `resources` of a container, in the form that the API server stores."""
    requests = _amounts(given.requests if given else None)
    limits = _amounts(given.limits if given else None)
    planned_requests = {name: canonical(one) for name, one in planned.requests.items() if name not in limits}
    planned_limits = {name: canonical(one) for name, one in planned.limits.items()}
    raised = {
        name: requests[name]
        for name, limit in planned_limits.items()
        if name in requests and amount(limit) < amount(requests[name])
    }
    merged = {"requests": planned_requests | requests, "limits": planned_limits | raised | limits}
    return {key: value for key, value in merged.items() if value}


def _amounts(resources: ResourceList | None) -> dict[str, str]:
    given = resources.model_dump(by_alias=True, exclude_none=True) if resources is not None else {}
    return {name: canonical(one) for name, one in given.items()}
