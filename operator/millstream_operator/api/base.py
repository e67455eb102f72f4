"""What every API type shares: camelCase in YAML, strict types, no unknown fields, immutable once read."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints
from pydantic.alias_generators import to_camel

from millstream_operator.api.duration import DURATION_MAX_LENGTH, DURATION_PATTERN


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
LabelValue = Annotated[str, StringConstraints(pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$", max_length=63)]
# A label or annotation key: an optional DNS prefix and a name. Keys of a map cannot carry a pattern in a CRD,
# so `api/rules.py` says it a second time in CEL.
QUALIFIED_NAME_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
QualifiedName = Annotated[str, StringConstraints(pattern=QUALIFIED_NAME_PATTERN, min_length=1, max_length=317)]
DNSSubdomain = Annotated[
    str,
    StringConstraints(
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", min_length=1, max_length=253
    ),
]
