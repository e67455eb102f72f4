"""Where an inspection's answer is kept: in a ControllerRevision of its own, beside those of the plans.

    demo-<ten hex digits>    millstream.dev/inspection: <key>    data: {format, kind: Inspection, answer: {…}}

A record of its own, because it is needed before there is a plan, and outlives plans that are refused. Of this kind,
because it is immutable by the API server's own rule, belongs to its owner, survives a restart, and is watched
already: no new watch and no new right, above all none on ConfigMaps. The answer is kept as the runtime gave it, so a
later operator may read more from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.names import INSPECTION_LABEL, child

FORMAT, KIND = 1, "Inspection"
HISTORY_LIMIT = 8  # records kept; a spec that goes back finds what it ran with


def is_inspection(stored: Mapping[str, Any]) -> bool:
    """Is this ControllerRevision an inspection's and not a plan's?"""
    return INSPECTION_LABEL in stored["metadata"].get("labels", {})


def inspection_record(owner: LLMDeployment, key: str, answer: Mapping[str, Any], number: int) -> dict[str, Any]:
    """`number` orders the records by age."""
    record = child(owner, "apps/v1", "ControllerRevision", name=f"{owner.name}-i{key}")
    record["metadata"]["labels"][INSPECTION_LABEL] = key
    return record | {"revision": number, "data": {"format": FORMAT, "kind": KIND, "answer": dict(answer)}}


def read_record(stored: Iterable[Mapping[str, Any]], key: str) -> dict[str, Any] | None:
    """The answer that is kept for a key; None where there is none, or in a format that is not known here."""
    for record in stored:
        data = record.get("data") or {}
        if record["metadata"].get("labels", {}).get(INSPECTION_LABEL) == key and data.get("format") == FORMAT:
            answer: dict[str, Any] = data["answer"]
            return answer
    return None


def next_number(stored: Iterable[Mapping[str, Any]]) -> int:
    return max((int(record["revision"]) for record in stored), default=0) + 1


def superfluous_inspections(stored: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records beyond the history limit, oldest last."""
    found = sorted(filter(is_inspection, stored), key=lambda record: int(record["revision"]), reverse=True)
    return found[HISTORY_LIMIT:]
