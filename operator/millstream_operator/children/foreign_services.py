"""The condition `SelectedByOthers`: a Service that is not ours selects the pods by labels that the spec gives them.

Such pods get requests that are meant for another workload: by mistake, or because an author who may create no Service
and no pod gave them that workload's labels. Services are already within the operator's rights, and its watch brings its
own alone. So those of a namespace are listed only where a pod template has labels of others than the operator, and at
most once in LISTED_SECONDS per namespace. Of each its name and its selector are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.rules import OPERATOR_LABEL_PREFIXES
from millstream_operator.children.children import controlled_by
from millstream_operator.diagnosis.conditions import SELECTED_BY_OTHERS, Condition
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.kube.client import ApiError, ClusterClient
from millstream_operator.kube.fence import steady_seconds
from millstream_operator.kube.kinds import SERVICE

Manifest = dict[str, Any]
Labels = Mapping[str, str]
LISTED_SECONDS = 60.0
NOT_READABLE = (403, 404)
MAX_NAMED = 4


class ForeignServices:
    """Lists through `client`. `clock`: in seconds."""

    def __init__(self, client: ClusterClient, clock: Callable[[], float] = steady_seconds) -> None:
        self._client, self._clock = client, clock
        self._listed: dict[str, tuple[float, list[Manifest]]] = {}  # by namespace: when, and what is kept

    async def selecting(self, owner: LLMDeployment, template: Manifest) -> Condition | None:
        """Return the condition if another's Service selects pods of the template by labels that are not the operator's.

        None also where the operator may not list Services. Raises: ApiError, ApiUnreachable.
        """
        labels = template["metadata"].get("labels") or {}
        if not any(is_of_author(key) for key in labels):
            return None
        try:
            services = await self._services(owner.metadata.namespace or "")
        except ApiError as error:
            if error.status in NOT_READABLE:
                return None
            raise
        return selected_by(labels, (one for one in services if not controlled_by(one, owner)))

    async def _services(self, namespace: str) -> list[Manifest]:
        now = self._clock()
        if (known := self._listed.get(namespace)) is not None and now - known[0] < LISTED_SECONDS:
            return known[1]
        for other in [other for other, (when, _) in self._listed.items() if now - when >= LISTED_SECONDS]:
            del self._listed[other]
        listed, _ = await self._client.list(SERVICE, namespace, None)
        kept = [_slim(one) for one in listed if (one.get("spec") or {}).get("selector")]
        self._listed[namespace] = now, kept
        return kept


def is_of_author(key: str) -> bool:
    """Whether a label of a pod is none of the operator's own."""
    return not key.startswith(OPERATOR_LABEL_PREFIXES)


def selected_by(labels: Labels, services: Iterable[Manifest]) -> Condition | None:
    """Return the condition for the Services of others in the pods' namespace. Pure."""
    selecting = {
        one["metadata"]["name"]: selector
        for one in services
        if (selector := one["spec"]["selector"]).items() <= labels.items() and any(map(is_of_author, selector))
    }
    if not selecting:
        return None
    names = sorted(selecting)
    keys = sorted({key for selector in selecting.values() for key in selector if is_of_author(key)})
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    which = f"Service{'s' if len(names) > 1 else ''} {', '.join(names[:MAX_NAMED])}{more}"
    return Condition(
        SELECTED_BY_OTHERS,
        True,
        Reason.SELECTED_BY_OTHERS,
        f"The {which} of this namespace, not the operator's, {'selects' if len(names) == 1 else 'select'} the pods by "
        f"the label{'s' if len(keys) > 1 else ''} {', '.join(keys)}, so requests for another workload reach the model. "
        "Change the label in podTemplate.metadata.labels, or the Service's selector.",
    )


def _slim(service: Manifest) -> Manifest:
    metadata = {name: service["metadata"].get(name) for name in ("name", "ownerReferences")}
    return {"metadata": metadata, "spec": {"selector": dict(service["spec"]["selector"])}}
