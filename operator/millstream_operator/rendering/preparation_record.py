"""The record of a step of a model's preparation: an immutable ConfigMap.

    demo-q<ten hex digits>    millstream.dev/preparation: <key>    answer.json: what the step's pod said

It says that the step is done, so that a restart of the operator does none again, and holds the figures of the status.
It is stored as the pod wrote it, as the answer of an inspection is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.names import PREPARATION_LABEL, PREPARER, ROLE_LABEL, child

ANSWER_KEY = "answer.json"
HISTORY_LIMIT = 16  # records kept; a spec that goes back finds what it was judged by


def preparation_record(owner: LLMDeployment, key: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    record = child(owner, "v1", "ConfigMap", name=f"{owner.name}-q{key}")
    record["metadata"]["labels"] |= {PREPARATION_LABEL: key, ROLE_LABEL: PREPARER}
    return record | {"immutable": True, "data": {ANSWER_KEY: json.dumps(answer, sort_keys=True)}}


def recorded_text(stored: Iterable[Mapping[str, Any]], key: str) -> str | None:
    """Return what the pod of a step said; None where there is no record of it."""
    for record in stored:
        if record["metadata"].get("labels", {}).get(PREPARATION_LABEL) == key:
            return str((record.get("data") or {}).get(ANSWER_KEY, ""))
    return None


def outdated_records(stored: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records beyond the history limit: the oldest."""
    mine = [record for record in stored if PREPARATION_LABEL in record["metadata"].get("labels", {})]
    newest = sorted(mine, key=lambda one: int(one["metadata"]["resourceVersion"]), reverse=True)
    return newest[HISTORY_LIMIT:]
