"""The record of a step of a model's preparation: an immutable ConfigMap.

    demo-q<ten hex digits>    millstream.dev/preparation: <key>    answer.json: what the step's pod said

It says that the step is done, so that a restart of the operator does none again, and holds the figures of the status.
It is stored as the pod wrote it, as the answer of an inspection is. What is written into `model.cache` goes with its
volume: such a record names the volume's claim by its uid (`millstream.dev/cache-uid`) and holds for no other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.names import PREPARATION_LABEL, PREPARER, ROLE_LABEL, child

ANSWER_KEY = "answer.json"
CACHE_UID_ANNOTATION = "millstream.dev/cache-uid"
HISTORY_LIMIT = 16  # records kept; a spec that goes back finds what it was judged by


def preparation_record(
    owner: LLMDeployment, key: str, answer: Mapping[str, Any], cache_uid: str | None = None
) -> dict[str, Any]:
    """`cache_uid`: of the claim that holds the result; None where the answer is all of it."""
    record = child(owner, "v1", "ConfigMap", name=f"{owner.name}-q{key}")
    record["metadata"]["labels"] |= {PREPARATION_LABEL: key, ROLE_LABEL: PREPARER}
    if cache_uid is not None:
        record["metadata"]["annotations"] = {CACHE_UID_ANNOTATION: cache_uid}
    return record | {"immutable": True, "data": {ANSWER_KEY: json.dumps(answer, sort_keys=True)}}


def record_of_step(stored: Iterable[Mapping[str, Any]], key: str) -> Mapping[str, Any] | None:
    """Return the record of a step; None where there is none."""
    return next((one for one in stored if one["metadata"].get("labels", {}).get(PREPARATION_LABEL) == key), None)


def recorded_text(stored: Iterable[Mapping[str, Any]], key: str) -> str | None:
    """Return what the pod of a step said; None where there is no record of it."""
    record = record_of_step(stored, key)
    return None if record is None else str((record.get("data") or {}).get(ANSWER_KEY, ""))


def outdated_records(stored: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records beyond the history limit: the oldest."""
    mine = [record for record in stored if PREPARATION_LABEL in record["metadata"].get("labels", {})]
    newest = sorted(mine, key=lambda one: int(one["metadata"]["resourceVersion"]), reverse=True)
    return newest[HISTORY_LIMIT:]


def is_lost(record: Mapping[str, Any], cache_uid: str | None) -> bool:
    """Whether what a step made lies in no volume any more. `cache_uid`: of today's claim; None: there is none.

    A record of an older version names no claim: it holds while there is one.
    """
    named = (record["metadata"].get("annotations") or {}).get(CACHE_UID_ANNOTATION)
    return cache_uid is None or named not in (None, cache_uid)
