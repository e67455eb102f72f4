"""What every API type shares: camelCase in YAML, strict types, no unknown fields, immutable once read."""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticKnownError

from millstream_operator.api.duration import DURATION_MAX_LENGTH, DURATION_PATTERN

Item = TypeVar("Item", bound=BaseModel)


class ApiModel(BaseModel):
    """A part of the API. `None` means absent: "let the planner choose"; nothing is ever null in YAML."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        strict=True,
    )


Duration = Annotated[str, StringConstraints(pattern=DURATION_PATTERN, min_length=2, max_length=DURATION_MAX_LENGTH)]
LABEL_VALUE_PATTERN = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
LabelValue = Annotated[str, StringConstraints(pattern=LABEL_VALUE_PATTERN, max_length=63)]
# A label or annotation key as the API server takes it: an optional DNS subdomain and a name. Keys of a map cannot carry
# a pattern in a CRD, so `api/rules.py` says both patterns a second time in CEL.
_DNS = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
QUALIFIED_NAME_PATTERN = f"^({_DNS}([.]{_DNS})*/)?([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]$"
QUALIFIED_NAME_PARTS_PATTERN = "^([^/]{1,253}/)?[^/]{1,63}$"  # how long the subdomain and the name may be


def is_qualified_name(text: str) -> bool:
    """Whether the API server takes the text as the key of a label."""
    return all(re.fullmatch(pattern, text) for pattern in (QUALIFIED_NAME_PATTERN, QUALIFIED_NAME_PARTS_PATTERN))


def _within_its_parts(text: str) -> str:
    if not re.fullmatch(QUALIFIED_NAME_PARTS_PATTERN, text):
        raise PydanticKnownError("string_pattern_mismatch", {"pattern": QUALIFIED_NAME_PARTS_PATTERN})
    return text


QualifiedName = Annotated[
    str,
    StringConstraints(pattern=QUALIFIED_NAME_PATTERN, min_length=1, max_length=317),
    AfterValidator(_within_its_parts),
    Field(json_schema_extra={"allOf": [{"pattern": QUALIFIED_NAME_PARTS_PATTERN}]}),
]


def _qualified_in_small_letters(text: str) -> str:
    if not is_qualified_name(text.lower()):
        raise PydanticKnownError("string_pattern_mismatch", {"pattern": QUALIFIED_NAME_PATTERN})
    return text


# The API server takes annotations' keys in any case, and labels' prefixes in small letters alone.
AnnotationName = Annotated[str, AfterValidator(_qualified_in_small_letters)]


def once_per(key: str) -> AfterValidator:
    """What the API server asks of a list whose items have a key (`x-kubernetes-list-map-keys`): each key once."""

    def check(items: list[Item]) -> list[Item]:
        seen: set[object] = set()
        for item in items:
            value = getattr(item, key)
            if value in seen:
                raise ValueError(f"the {key} {value} is given twice")
            seen.add(value)
        return items

    return AfterValidator(check)


DNS_SUBDOMAIN_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
DNSSubdomain = Annotated[str, StringConstraints(pattern=DNS_SUBDOMAIN_PATTERN, min_length=1, max_length=253)]
