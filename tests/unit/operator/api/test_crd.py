"""The CustomResourceDefinition: generated, current, structural, explained and bounded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from millstream_operator.api import crd
from millstream_operator.api.base import QUALIFIED_NAME_PATTERN, is_qualified_name
from millstream_operator.api.pod_template import Quantity
from millstream_operator.api.rules import RULES

ROOT = Path(__file__).resolve().parents[4]
Schema = dict[str, Any]
# What a CRD's schema may say (apiextensions.k8s.io/v1, "structural"), and nothing that Pydantic adds to it.
STRUCTURAL_KEYWORDS = {
    "type",
    "description",
    "default",
    "enum",
    "format",
    "pattern",
    "minLength",
    "minProperties",
    "maxLength",
    "minimum",
    "maximum",
    "minItems",
    "maxItems",
    "maxProperties",
    "required",
    "properties",
    "items",
    "additionalProperties",
    "allOf",
    "anyOf",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-list-type",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-validations",
}


def object_schema() -> Schema:
    (version,) = crd.custom_resource_definition()["spec"]["versions"]
    schema: Schema = version["schema"]["openAPIV3Schema"]
    return schema


def nodes(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every node of the schema below `spec` and `status`, with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}" if path else name)
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


NODES = {
    path: node for part in ("spec", "status") for path, node in nodes(object_schema()["properties"][part], path=part)
}


@pytest.mark.parametrize("copy", crd.COPIES)
def test_the_committed_copies_are_what_the_types_say(copy: str) -> None:
    assert (ROOT / copy).read_text(encoding="utf-8") == crd.crd_yaml(), "run `make crds`"


def test_check_mode_reports_a_stale_copy_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert crd.main(["--check"]) == 1
    assert "make crds" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert crd.main([]) == 0
    assert crd.main(["--check"]) == 0


def test_the_committed_text_reads_back_as_it_was_meant() -> None:
    assert yaml.safe_load(crd.crd_yaml()) == crd.custom_resource_definition()


def test_every_field_is_described() -> None:
    """`kubectl explain` shows nothing else."""
    silent = [path for path, node in NODES.items() if not path.endswith(("[]", "{}")) and not node.get("description")]
    assert not silent


def test_the_schema_is_structural() -> None:
    for path, node in NODES.items():
        assert node.keys() <= STRUCTURAL_KEYWORDS, path
        if node.get("x-kubernetes-int-or-string"):
            assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
            continue
        assert "anyOf" not in node, f"{path}: optional is absent, never null"
        assert all(part.keys() == {"pattern"} for part in node.get("allOf", ())), (
            f"{path}: only values are checked there"
        )
        assert isinstance(node.get("type"), str), path
        assert not ("properties" in node and "additionalProperties" in node), path


def test_the_api_server_refuses_the_same_label_keys_as_the_operator() -> None:
    """Else it stores an object that is InvalidSpec: a name has at most 63 characters, its prefix at most 253."""
    keys = [node for path, node in NODES.items() if node.get("pattern") == QUALIFIED_NAME_PATTERN]
    assert keys
    for key, is_valid in {"x" * 63: True, "x" * 64: False, f"{'a' * 254}/x": False, f"{'a' * 253}/x": True}.items():
        assert is_qualified_name(key) is is_valid
        for node in keys:
            patterns = [node["pattern"], *(part["pattern"] for part in node["allOf"])]
            assert all(re.fullmatch(pattern, key) for pattern in patterns) is is_valid


def test_the_api_server_refuses_the_same_numbers_as_quantities_as_the_operator() -> None:
    """Its pattern is about strings alone: -1 and 2^63 - 1 were stored, and the object was InvalidSpec."""
    quantities = [node for node in NODES.values() if node.get("x-kubernetes-int-or-string")]
    assert quantities
    for number in (-1, 0, 10**15 - 1, 10**15):
        try:
            TypeAdapter(Quantity).validate_python(number)
            is_taken = True
        except ValidationError:
            is_taken = False
        assert all((node["minimum"] <= number <= node["maximum"]) is is_taken for node in quantities), number


def test_every_string_list_and_map_is_bounded() -> None:
    """Without bounds the API server refuses CEL rules as too costly, and one object could fill etcd."""
    for path, node in NODES.items():
        if node.get("type") == "array":
            assert "maxItems" in node, path
            assert node.get("x-kubernetes-list-type") in ("atomic", "map"), f"{path}: how do two writers merge it?"
        if (node.get("type") == "string" and "enum" not in node) or node.get("x-kubernetes-int-or-string"):
            assert "maxLength" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_every_pattern_means_the_same_in_go() -> None:
    """RE2 has neither look-around nor back-references; anchors keep a pattern from matching a part."""
    for path, node in NODES.items():
        if (pattern := node.get("pattern")) is not None:
            assert pattern.startswith("^"), path
            assert pattern.endswith("$"), path
            assert not re.search(r"\(\?|\\[0-9]", pattern), path


def test_no_enum_value_reads_as_a_boolean_in_yaml() -> None:
    for path, node in NODES.items():
        for value in node.get("enum", []):
            if path != "status.conditions[].status":  # metav1.Condition's own; written by the operator, quoted
                assert yaml.safe_load(value) == value, path


def test_no_field_of_the_spec_is_a_float() -> None:
    assert not [path for path, node in NODES.items() if node.get("type") == "number"]


def test_every_rule_is_in_the_schema_at_its_own_place() -> None:
    for rule in RULES:
        place = object_schema() if not rule.path else NODES[rule.path]
        assert {"rule": rule.cel, "message": rule.message} in place["x-kubernetes-validations"], rule.path


def test_only_the_servers_own_defaults_are_in_the_schema() -> None:
    """A planner's default in the schema would be written into stored objects and could never change."""
    defaults = {path: node["default"] for path, node in NODES.items() if "default" in node}
    assert defaults == {"spec.replicas": 1, "status": {"observedGeneration": -1}}


def test_columns_and_subresources_point_at_fields_that_exist() -> None:
    (version,) = crd.custom_resource_definition()["spec"]["versions"]
    scale = version["subresources"]["scale"]
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]] + list(scale.values())
    for path in paths:
        if not path.startswith(".metadata."):
            field = re.sub(r"\[\?\(.*\)\]", "[]", path.removeprefix("."))
            assert field in NODES, path
    names = [column["name"] for column in version["additionalPrinterColumns"]]
    assert names[:7] == ["Ready", "Reason", "Replicas", "Plan", "URL", "Age", "Model"]
    assert version["subresources"]["status"] == {}
