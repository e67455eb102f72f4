"""What a field takes, in words: for a value of another form or type, and for a field that does not exist.

The schema says it as a pattern, which is no sentence for a person.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from millstream_operator.api.access import CIDR_PATTERN
from millstream_operator.api.affinity import NAMESPACE_PATTERN
from millstream_operator.api.base import (
    DNS_SUBDOMAIN_PATTERN,
    LABEL_VALUE_PATTERN,
    QUALIFIED_NAME_PARTS_PATTERN,
    QUALIFIED_NAME_PATTERN,
)
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_runtime.allowed_origins import ORIGIN_PATTERN

Location = tuple[int | str, ...]
MAX_PLACES = 3  # of a field that was written elsewhere
HINTS = {  # what a pattern means, by the field's name
    "timeout": "a duration such as 30s, 20m or 1h30m",
    "heartbeatInterval": "a duration such as 30s or 5m, or 0s for off",
    "progressDeadline": "a duration such as 30m or 1h",
    "evidenceTimeout": "a duration such as 30m or 2h",
    "drainTimeout": "a duration such as 30s or 10m",
    "p95": "a latency such as 200ms or 1s",
    "repository": "a repository such as org/name, or org/name:Q4_K_M for one of its GGUF files",
    "reference": "an image reference such as registry.example.com/model:1.0",
    "path": "a folder below the model root or an absolute one, without '..' or segments that start with a dot",
    "servedName": "letters, digits and . _ - : / with a letter or digit at both ends",
    "image": "an image reference such as registry.example.com/runtime:1.0",
    "cpu": "a quantity such as 2 or 500m (a fraction in quotes)",
    "memory": "a quantity such as 512Mi or 4Gi",
    "ephemeral-storage": "a quantity such as 2Gi",
    "size": "a size such as 4Gi or 500G",
    "maxMeanKL": "a number such as 50m (0.05)",
    "maxP99KL": "a number such as 500m (0.5)",
    "maxPerplexityRatio": 'a ratio such as "1.03"',
    "scaleDownStabilization": "a duration such as 30s or 5m",
    "revision": "a branch, a tag or a commit, such as main",
}
KEY_HINT = "a name of at most 63 characters such as team, or with a DNS prefix of at most 253 such as example.com/team"
PATTERN_HINTS = {  # of fields that have no name of their own, such as the values of a map, or one of several meanings
    "^[-._a-zA-Z0-9]+$": "a key of the Secret or ConfigMap: letters, digits and - . _",
    "^[A-Za-z0-9][A-Za-z0-9._-]*$": "a GPU's name such as A100-80GB",
    "^[A-Za-z_][A-Za-z0-9_]*$": "a variable's name: letters, digits and _",
    ORIGIN_PATTERN: "scheme://host or scheme://host:port in lower case, without a path or a slash at the end, such as "
    "https://chat.example.com, or *",
    CIDR_PATTERN: "a block of addresses such as 192.0.2.0/24 or 2001:db8::/32",
    LABEL_VALUE_PATTERN: "a label's value: letters, digits and - _ . with a letter or digit at both ends",
    QUALIFIED_NAME_PATTERN: KEY_HINT,
    QUALIFIED_NAME_PARTS_PATTERN: KEY_HINT,
    NAMESPACE_PATTERN: "the name of a namespace: lower-case letters, digits and - with a letter or digit at both ends",
    DNS_SUBDOMAIN_PATTERN: "a name of lower-case letters, digits, - and . with a letter or digit at both ends",
}
TYPES = {"a valid integer": "a whole number", "a valid array": "a list"}  # Pydantic's words, and ours
QUANTITIES = ("cpu", "memory", "ephemeral-storage")


def wanted(details: ErrorDetails, field: str, context: dict[str, Any]) -> str:
    """Return what must stand there, as the end of "it must be …". `field`: the last name of the location."""
    if details["type"] in ("enum", "literal_error"):
        return str(context.get("expected", "")).replace("'", "")
    if details["type"] == "string_pattern_mismatch":
        pattern = str(context.get("pattern"))
        return HINTS.get(field) or PATTERN_HINTS.get(pattern) or f"of the form {pattern}"
    if field in QUANTITIES and isinstance(details["input"], float):
        return HINTS[field]
    if details["type"] == "string_type" and isinstance(details["input"], bool | int | float):
        return f"{HINTS[field]}, as a string" if field in HINTS else "a string: put it in quotes"
    words = details["msg"].removeprefix("Input should be ")
    for theirs, ours in TYPES.items():
        words = words.replace(theirs, ours)
    return words.replace("a valid ", "a ")


def unknown_field_hint(location: Location) -> str:
    """Return what an unknown field may have been meant as, or where it belongs."""
    if (meant := meant_field(location)) is not None:
        return f"; did you mean {meant}"
    name, known = str(location[-1]), _fields_at(location[:-1])
    places = [place for place in _places(LLMDeployment, name) if not place.startswith("status.")]
    if 0 < len(places) <= MAX_PLACES:
        return f"; it belongs at {' or '.join(places)}"
    return f" (known here: {', '.join(known)})" if known else ""


def meant_field(location: Location) -> str | None:
    """Return the name of the field that an unknown one is close to."""
    close = difflib.get_close_matches(str(location[-1]), _fields_at(location[:-1]), n=1, cutoff=0.6)
    return close[0] if close else None


def is_required(location: Location) -> bool:
    """Whether an object without the field at a location is refused."""
    model = _model_at(location[:-1])
    fields = {} if model is None else {field.alias or name: field for name, field in model.model_fields.items()}
    field = fields.get(str(location[-1])) if location else None
    return field is not None and field.is_required()


def _fields_at(location: Location) -> list[str]:
    """YAML names of the fields of the model that stands at a location."""
    model = _model_at(location)
    return [] if model is None else [field.alias or name for name, field in model.model_fields.items()]


def _model_at(location: Location) -> type[BaseModel] | None:
    model: type[BaseModel] | None = LLMDeployment
    for step in location:
        if isinstance(step, int) or model is None:
            continue
        fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
        model = next(iter(_models_in(fields.get(str(step)))), None)
    return model


def _places(model: type[BaseModel], wanted_name: str, parent: str = "") -> Iterator[str]:
    """Dotted paths of all fields of that name."""
    for name, field in model.model_fields.items():
        path = f"{parent}{field.alias or name}"
        if (field.alias or name) == wanted_name:
            yield path
        for below in _models_in(field.annotation):
            yield from _places(below, wanted_name, f"{path}.")


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found: list[type[BaseModel]] = []
    for argument in getattr(annotation, "__args__", ()):
        found += _models_in(argument)
    return found
