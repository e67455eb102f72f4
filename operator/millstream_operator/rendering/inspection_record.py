"""The record of an inspection's answer: an immutable ConfigMap.

    demo-i<ten hex digits>    millstream.dev/inspection: <key>    answer.json: what `millstream inspect` said

It is a separate object, because it is needed before there is a plan, and outlives plans that are refused. It is a
ConfigMap, because the API server keeps one immutable, it belongs to its owner, survives a restart, and is watched
already: no new watch and no new right. The answer is stored as the runtime wrote it, so that a later operator may read
more from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.catalog.inspected_model import UnknownAnswerError, read_answer
from millstream_operator.rendering.names import INSPECTION_LABEL, child

ANSWER_KEY = "answer.json"
HISTORY_LIMIT = 8  # records kept; a spec that goes back finds what it ran with


def inspection_record(owner: LLMDeployment, key: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    record = child(owner, "v1", "ConfigMap", name=f"{owner.name}-i{key}")
    record["metadata"]["labels"][INSPECTION_LABEL] = key
    return record | {"immutable": True, "data": {ANSWER_KEY: json.dumps(answer, sort_keys=True)}}


def is_inspection(stored: Mapping[str, Any]) -> bool:
    """Return whether this ConfigMap is the record of an inspection."""
    return INSPECTION_LABEL in stored["metadata"].get("labels", {})


def read_record(stored: Iterable[Mapping[str, Any]], key: str) -> dict[str, Any] | None:
    """Return the answer for a key; None where there is none, or where its format is not known."""
    for record in stored:
        if record["metadata"].get("labels", {}).get(INSPECTION_LABEL) == key:
            try:
                return read_answer((record.get("data") or {}).get(ANSWER_KEY, ""))
            except UnknownAnswerError:
                return None
    return None


def kept_inspections(stored: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names of the records to keep: the newest, up to the history limit."""
    found = sorted(filter(is_inspection, stored), key=lambda one: int(one["metadata"]["resourceVersion"]), reverse=True)
    return {record["metadata"]["name"] for record in found[:HISTORY_LIMIT]}
