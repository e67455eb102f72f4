"""API types -> structural OpenAPI v3, the dialect that a CRD accepts.

Pydantic writes JSON Schema 2020-12, most of which a CRD refuses: `$ref`, `anyOf … null` for optional fields,
`const`, `title`, and `additionalProperties: false` next to `properties`. The generator below says the same in the
subset that the API server calls structural; unknown fields are pruned or refused there by the server itself.
"""

from __future__ import annotations

import copy
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema


class _StructuralSchema(GenerateJsonSchema):
    """Pydantic's generator without what has no meaning in a CRD."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])  # absent, never null

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        default = schema.get("default")
        return inner if default is None else {**inner, "default": default}


def structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The structural schema of an API type; nested types are written out in place, with descriptions everywhere."""
    raw = model.model_json_schema(by_alias=True, schema_generator=_StructuralSchema)
    definitions = raw.pop("$defs", {})
    return _structural(raw, definitions)


def _structural(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    node = _inlined(node, definitions)
    node.pop("title", None)
    node.pop("propertyNames", None)  # keys of maps are bounded by rules in CEL
    if "properties" in node:
        node.pop("additionalProperties", None)
        node["properties"] = {name: _structural(child, definitions) for name, child in node["properties"].items()}
    values = [*node.pop("patternProperties", {}).values(), node.pop("additionalProperties", None)]
    if isinstance(values[0], dict):
        node["additionalProperties"] = _structural(values[0], definitions)
    if "items" in node:
        node["items"] = _structural(node["items"], definitions)
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if "enum" in node:
        node["type"] = "string"
    return {key: node[key] for key in sorted(node, key=_reading_order)}


def _reading_order(key: str) -> tuple[int, str]:
    """What a field is comes first, what is in it comes last."""
    first = ("description", "type", "default", "enum")
    last = ("required", "properties", "items", "additionalProperties", "x-kubernetes-validations")
    if key in first:
        return first.index(key), ""
    return (len(first), key) if key not in last else (len(first) + 1 + last.index(key), "")


def _inlined(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A `$ref` replaced by what it names; the field's own description wins over the type's."""
    node = copy.deepcopy(node)
    while (reference := node.pop("$ref", None)) is not None:
        target = copy.deepcopy(definitions[reference.rsplit("/", 1)[-1]])
        node = {**target, **node}
    return node
