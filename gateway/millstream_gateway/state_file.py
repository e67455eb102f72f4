"""The state of replicas in a file, for `millstream route explain --replicas`: what a picker would know at one moment.

    {"replicas": [
       {"endpoint": "10.0.0.1:8000", "age_seconds": 0.04, "load": {…}, "holds": ["the prompts that it answered"]}]}

`load` is the body of the replica's `/load`; null: it has not answered yet. `holds`, oldest first, are user messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from millstream_gateway.picker_beliefs import PickerBeliefs
from millstream_gateway.replica_report import Replica, ReportError, read_answers, read_report
from millstream_gateway.routed_request import routed_request
from millstream_runtime.strict_json import read_strict_json

MOST_REPLICAS = 1000
MOST_AGE_SECONDS = 3600.0
FIELDS = ("endpoint", "age_seconds", "load", "holds")
ENDPOINT = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}:[0-9]{1,5}", re.ASCII)


class StateError(ValueError):
    """A state file cannot be used; the message names the field and the value."""


@dataclass(frozen=True, slots=True)
class PickerState:
    """What a picker would know at `now_seconds` of its clock."""

    replicas: tuple[Replica, ...]
    beliefs: PickerBeliefs
    now_seconds: float


def idle_state(num_replicas: int) -> PickerState:
    """Return the state before any replica has reported: all are alike."""
    replicas = tuple(Replica(f"replica-{number + 1}:8000") for number in range(num_replicas))
    return PickerState(replicas, PickerBeliefs(), 0.0)


def read_state(text: bytes, model: str) -> PickerState:
    """Return the state of a file's text.

    Raises:
        StateError: it is not strict JSON, or a field is missing, unknown, or has a value that cannot be.
    """
    try:
        document = read_strict_json(text)
    except ValueError as error:
        raise StateError(f"not JSON that can be read: {error}") from None
    if not isinstance(document, dict) or document.keys() != {"replicas"}:
        raise StateError('it must be an object with the one field "replicas"')
    entries = document["replicas"]
    if not isinstance(entries, list) or len(entries) > MOST_REPLICAS:
        raise StateError(f"replicas must be a list of at most {MOST_REPLICAS} objects")
    beliefs = PickerBeliefs()
    replicas = [_read_replica(entry, f"replicas[{index}]", model, beliefs) for index, entry in enumerate(entries)]
    endpoints = [replica.endpoint for replica in replicas]
    if (twice := next((one for one in endpoints if endpoints.count(one) > 1), None)) is not None:
        raise StateError(f"two replicas have the endpoint {twice}; give each its own")
    return PickerState(tuple(replicas), beliefs, 0.0)


def _read_replica(entry: Any, path: str, model: str, beliefs: PickerBeliefs) -> Replica:
    if not isinstance(entry, dict):
        raise StateError(f"{path} must be an object")
    if (unknown := next((name for name in entry if name not in FIELDS), None)) is not None:
        raise StateError(f"{path}.{unknown[:40]} is not a field; the fields are {', '.join(FIELDS)}")
    endpoint = entry.get("endpoint")
    if not isinstance(endpoint, str) or not ENDPOINT.fullmatch(endpoint):
        raise StateError(f"{path}.endpoint must be an address and a port such as 10.0.0.1:8000, not {endpoint!r:.40}")
    age_seconds = entry.get("age_seconds", 0.0)
    if type(age_seconds) not in (int, float) or not 0 <= age_seconds <= MOST_AGE_SECONDS:
        raise StateError(
            f"{path}.age_seconds must be a number from 0 to {MOST_AGE_SECONDS:.0f}, not {age_seconds!r:.40}"
        )
    report = None
    if entry.get("load") is not None:
        try:
            report, answers = read_report(entry["load"]), read_answers(entry["load"])
        except ReportError as error:
            raise StateError(f"{path}.load: {error}") from None
        beliefs.observe_report(endpoint, report, answers)
    _believe(entry.get("holds", []), path, endpoint, model, beliefs)
    return Replica(endpoint, report, -float(age_seconds))


def _believe(holds: Any, path: str, endpoint: str, model: str, beliefs: PickerBeliefs) -> None:
    if not isinstance(holds, list) or not all(isinstance(prompt, str) for prompt in holds):
        raise StateError(f"{path}.holds must be a list of texts: prompts that this replica has answered")
    for number, prompt in enumerate(holds):
        request = routed_request(f"{endpoint}/{number}", model, user_message(prompt))
        beliefs.decide(request, endpoint, -MOST_AGE_SECONDS - 1)  # answered before its report


def user_message(prompt: str) -> dict[str, Any]:
    """Return the body of a chat with one message."""
    return {"messages": [{"role": "user", "content": prompt}]}
