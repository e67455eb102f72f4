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
MADE_EVENTS = frozenset({"quantized", "tuned"})  # of answers whose result is in the cache
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


def lost_records(stored: Iterable[Mapping[str, Any]], cache_uid: str | None) -> list[Mapping[str, Any]]:
    """Return the records of what lies in no volume any more. `cache_uid`: of today's claim; None: there is none.

    A record of an older version names no claim: it holds while there is one.
    """
    made = [one for one in stored if PREPARATION_LABEL in one["metadata"].get("labels", {}) and _is_made(one)]
    return [one for one in made if cache_uid is None or _cache_uid(one) not in (None, cache_uid)]


def _cache_uid(record: Mapping[str, Any]) -> str | None:
    found: str | None = (record["metadata"].get("annotations") or {}).get(CACHE_UID_ANNOTATION)
    return found


def _is_made(record: Mapping[str, Any]) -> bool:
    try:
        answer = json.loads((record.get("data") or {}).get(ANSWER_KEY, ""))
    except (ValueError, RecursionError):
        return False
    return isinstance(answer, dict) and str(answer.get("event")) in MADE_EVENTS
