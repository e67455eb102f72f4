"""One change that could make a spec feasible: other values of fields of the spec, nodes that are added, or both."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import GPUS_FIELD

WITH_FACTS = ("podTemplate", "speculation")  # these edits change which nodes count, or whether there is a draft


@dataclass(frozen=True, slots=True)
class Change:
    """`fields`: what is different, as (field, value) for people. `deployment` and `facts` are those with the change.

    `adds_nodes`: it needs other nodes than the cluster has, whatever else it edits. `step`: how far a number moves.
    """

    fields: tuple[tuple[str, str], ...]
    deployment: LLMDeployment
    facts: Facts
    adds_nodes: bool = False
    step: float = 0.0

    @property
    def field(self) -> str:
        return ", ".join(field for field, _ in self.fields)

    @property
    def value(self) -> str:
        return ", ".join(value for _, value in self.fields)

    def after(self, first: Change) -> Change:
        """Both changes as one, nodes first: this one was made of what the first one gave."""
        mine = dict(self.fields)
        kept = [(field, value) for field, value in first.fields if field not in mine]
        fields = sorted((*kept, *self.fields), key=lambda one: one[0] != GPUS_FIELD)
        adds_nodes, step = self.adds_nodes or first.adds_nodes, self.step + first.step
        return replace(self, fields=tuple(fields), adds_nodes=adds_nodes, step=step)

    def without(self, field: str, before: LLMDeployment) -> Change | None:
        """The change with the value of one field as it was. None for nodes and for edits that bring other facts."""
        if field == GPUS_FIELD or field.startswith(WITH_FACTS):
            return None
        try:
            deployment = with_field(self.deployment, field, value_at(spec_of(before), field))
        except ValidationError:
            return None
        kept = tuple(one for one in self.fields if one[0] != field)
        return replace(self, fields=kept, deployment=deployment)


def value_at(spec: dict[str, Any], path: str) -> Any:
    """The value of a field by its path; None where it is absent."""
    value: Any = spec
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value


def edit(deployment: LLMDeployment, facts: Facts, **values: Any) -> Change | None:
    """A change of fields by their paths, with `__` for the dot. None where the API forbids a value."""
    changed, fields = deployment, []
    for name, value in values.items():
        path = name.replace("__", ".")
        try:
            changed = with_field(changed, path, value)
        except ValidationError:
            return None
        fields.append((path, shown(value)))
    return Change(tuple(fields), changed, facts)


def shown(value: Any) -> str:
    """A value of the spec for people."""
    if value is None:
        return "absent"
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def with_field(deployment: LLMDeployment, path: str, value: Any) -> LLMDeployment:
    """A copy with one field of the spec set, or taken away where `value` is None.

    Raises:
        ValidationError: the API forbids the value.
    """
    spec = spec_of(deployment)
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


def spec_of(deployment: LLMDeployment) -> dict[str, Any]:
    """The spec as it is written in YAML."""
    return deployment.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
