"""The condition `AutoscalerConflict`: another's HorizontalPodAutoscaler scales our Deployment, which is undone.

The watch brings our own autoscalers alone. So those of a namespace are listed only while somebody else edits the
Deployment's replicas, and while the last status has the condition: a steady state costs the API server nothing, and a
restarted operator finds the same. KEDA's ScaledObject makes such a HorizontalPodAutoscaler, too.
"""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.children.children import controlled_by
from millstream_operator.diagnosis.conditions import AUTOSCALER_CONFLICT, Condition
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.kube.client import ApiError, ClusterClient
from millstream_operator.kube.diff import APPLIED_ANNOTATION, with_digest
from millstream_operator.kube.kinds import HORIZONTAL_POD_AUTOSCALER

Manifest = dict[str, Any]
NOT_READABLE = (403, 404)


def replicas_were_edited(live: Manifest | None, wanted: Manifest) -> bool:
    """Whether somebody else edited the replicas of a workload that we applied from this very manifest. Pure."""
    if live is None or live["spec"].get("replicas") == wanted["spec"]["replicas"]:
        return False
    applied = (live["metadata"].get("annotations") or {}).get(APPLIED_ANNOTATION)
    return bool(applied == with_digest(wanted)["metadata"]["annotations"][APPLIED_ANNOTATION])


class ForeignAutoscalers:
    """Lists through `client`."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client

    async def conflict(self, owner: LLMDeployment, workload: Manifest) -> Condition | None:
        """Return the condition if an autoscaler that is not the owner's targets its workload.

        None also where the operator may not list autoscalers. Raises: ApiError, ApiUnreachable.
        """
        try:
            listed, _ = await self._client.list(HORIZONTAL_POD_AUTOSCALER, owner.metadata.namespace, None)
        except ApiError as error:
            if error.status in NOT_READABLE:
                return None
            raise
        return conflict_with(owner, workload, listed)


def conflict_with(owner: LLMDeployment, workload: Manifest, listed: list[Manifest]) -> Condition | None:
    """Return the condition for the autoscalers of the owner's namespace. Pure."""
    foreign = [one for one in listed if _targets(one, workload) and not controlled_by(one, owner)]
    if not foreign:
        return None
    names = " and ".join(sorted(map(_name, foreign)))
    kind, name = workload["kind"], workload["metadata"]["name"]
    scale = "scales" if len(foreign) == 1 else "scale"
    return Condition(
        AUTOSCALER_CONFLICT,
        True,
        Reason.AUTOSCALER_CONFLICT,
        f"The {names} {scale} the {kind} {name}, whose replicas follow spec.replicas of the LLMDeployment: the "
        f"operator takes each change back. Let its scaleTargetRef name the LLMDeployment (apiVersion: "
        f"{owner.api_version}, kind: {owner.kind}, name: {owner.name}), or delete it and set spec.autoscaling.",
    )


def _targets(autoscaler: Manifest, workload: Manifest) -> bool:
    target = (autoscaler.get("spec") or {}).get("scaleTargetRef") or {}
    group = str(target.get("apiVersion", "")).partition("/")[0]
    return bool(
        group == str(workload["apiVersion"]).partition("/")[0]
        and target.get("kind") == workload["kind"]
        and target.get("name") == workload["metadata"]["name"]
    )


def _name(autoscaler: Manifest) -> str:
    """With its controller, which is what a person has to edit: KEDA writes its own back."""
    references = autoscaler["metadata"].get("ownerReferences") or ()
    controller = next((one for one in references if one.get("controller")), None)
    whose = f" (of the {controller['kind']} {controller['name']})" if controller is not None else ""
    return f"HorizontalPodAutoscaler {autoscaler['metadata']['name']}{whose}"
