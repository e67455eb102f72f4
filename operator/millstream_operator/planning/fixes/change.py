"""One change that could make a spec feasible: another value of a field, or other GPUs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.facts import Facts


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that could be different."""

    field: str
    value: str
    deployment: LLMDeployment
    facts: Facts


def with_field(deployment: LLMDeployment, path: str, value: Any) -> LLMDeployment:
    """A copy with one field of the spec set, or taken away where `value` is None."""
    spec = deployment.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    *parents, last = path.split(".")
    place = spec
    for step in parents:
        place = place.setdefault(step, {})
    if value is None:
        place.pop(last, None)
    else:
        place[last] = value
    changed = type(deployment.spec).model_validate_json(json.dumps(spec))
    return deployment.model_copy(update={"spec": changed})
