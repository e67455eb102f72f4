"""A pattern of the schema is explained in words wherever a value may miss it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millstream_operator.api.crd import custom_resource_definition
from millstream_operator.api.validation.field_hints import HINTS, PATTERN_HINTS


def patterns(schema: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The pattern and the last name of every field below a schema."""
    if not isinstance(schema, dict):
        return
    for part in (schema, *schema.get("allOf", ())):
        if "pattern" in part:
            yield name, part["pattern"]
    for child, below in schema.get("properties", {}).items():
        yield from patterns(below, child)
    for nameless in ("items", "additionalProperties"):
        yield from patterns(schema.get(nameless))


def test_every_pattern_of_the_spec_is_explained() -> None:
    (version,) = custom_resource_definition()["spec"]["versions"]
    found = set(patterns(version["schema"]["openAPIV3Schema"]["properties"]["spec"]))
    assert len(found) > 20
    assert {one for one in found if one[0] not in HINTS and one[1] not in PATTERN_HINTS} == set()
