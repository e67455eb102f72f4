"""Kubernetes Events on the LLMDeployment: one per decision, and one per change of Ready's reason. Pure.

`kubectl describe llmd` shows them under the conditions, so a person sees what happened before the present state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from millstream_operator.api import API_VERSION, KIND
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.diagnosis.conditions import READY, find
from millstream_operator.diagnosis.decisions import DecisionType
from millstream_operator.diagnosis.reasons import NEEDS_A_PERSON, Reason
from millstream_operator.rendering.names import MANAGER

MESSAGE_LIMIT_CHARACTERS = 1000  # the API's limit is 1024
BAD_DECISIONS = frozenset(
    {
        DecisionType.ROLLED_BACK,
        DecisionType.ROLLOUT_STOPPED,
        DecisionType.QUALITY_GATE_FAILED,
        DecisionType.DRAFTER_FAILED,
    }
)
# Steps between two states get no Event: the conditions show them while they last.
QUIET = frozenset({Reason.ASKING_MODEL, Reason.NO_REPLICA_AVAILABLE})


def decision_events(
    owner: LLMDeployment, before: dict[str, Any], after: dict[str, Any], now: str
) -> Iterator[dict[str, Any]]:
    """Yield an Event per decision that is new in the journal, in their order."""
    known = before.get("decisions") or ()
    for entry in reversed([entry for entry in after.get("decisions") or () if entry not in known]):
        yield _event(_metadata(owner), entry["type"], entry["message"], now, is_warning=entry["type"] in BAD_DECISIONS)


def event_for(owner: LLMDeployment, before: dict[str, Any], after: dict[str, Any], now: str) -> dict[str, Any] | None:
    """Return the Event for a change of the status; None when Ready's reason did not change."""
    return event_for_object(_metadata(owner), before, after, now)


def event_for_object(
    metadata: Mapping[str, Any], before: dict[str, Any], after: dict[str, Any], now: str
) -> dict[str, Any] | None:
    """As `event_for`, also for an object whose spec cannot be parsed: `metadata` is as the API has it."""
    was, ready = find(before.get("conditions", ()), READY), find(after.get("conditions", ()), READY)
    if not ready or (was.get("status"), was.get("reason")) == (ready["status"], ready["reason"]):
        return None
    if ready["reason"] in QUIET:
        return None
    return _event(metadata, ready["reason"], ready["message"], now, is_warning=_is_warning(was, ready))


def managed_by_another_event(metadata: Mapping[str, Any], name: str, message: str, now: str) -> dict[str, Any]:
    """Return the Event of that name which says that another release manages the object."""
    event = _event(metadata, Reason.MANAGED_BY_ANOTHER, message, now, is_warning=True)
    return event | {"metadata": {"name": name, "namespace": metadata["namespace"]}}


def _metadata(owner: LLMDeployment) -> dict[str, Any]:
    metadata = owner.metadata
    return {
        "name": owner.name,
        "namespace": metadata.namespace,
        "uid": metadata.uid,
        "resourceVersion": metadata.resource_version,
    }


def _event(metadata: Mapping[str, Any], reason: str, message: str, now: str, *, is_warning: bool) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            **{key: metadata.get(key) for key in ("name", "namespace", "uid", "resourceVersion")},
        },
        "type": "Warning" if is_warning else "Normal",
        "reason": reason,
        "message": message[:MESSAGE_LIMIT_CHARACTERS],
        "source": {"component": MANAGER},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _is_warning(was: dict[str, Any], ready: dict[str, Any]) -> bool:
    if ready["status"] == "True":
        return False
    in_progress = {Reason.INSPECTING, Reason.QUANTIZING, Reason.JUDGING_QUALITY, Reason.STARTING, Reason.ROLLING_OUT}
    if ready["reason"] in in_progress and was.get("observedGeneration") != ready.get("observedGeneration"):
        return False  # the spec asked for it
    return was.get("status") == "True" or ready["reason"] in NEEDS_A_PERSON or ready["reason"] not in in_progress
