"""The reference pages say what the code says: every reason, every field, every right and setting, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic.alias_generators import to_camel

from hack.reference import api as api_reference
from millstream_operator import settings
from millstream_operator.api.crd import custom_resource_definition
from millstream_operator.diagnosis import conditions
from millstream_operator.diagnosis.decisions import DecisionType
from millstream_operator.diagnosis.reasons import NEEDS_A_PERSON, Reason
from millstream_operator.planning.restart_fields import APPLIED_LIVE, NOT_IN_PODS

DOCS = Path(__file__).resolve().parents[3] / "docs"
ROOT = DOCS.parent


def rows(page: str) -> list[list[str]]:
    """Cells of every table row of a page, without headers and rulers."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    assert cells
    return cells


REASON_ROWS = {row[0]: row for row in rows("reasons.md") if len(row) == 4}


def test_every_reason_is_explained_and_no_other() -> None:
    explained = [re.sub(r"`(\w+)`.*", r"\1", first) for first in REASON_ROWS]
    assert sorted(explained) == sorted(str(reason) for reason in Reason)


@pytest.mark.parametrize("first", REASON_ROWS)
def test_a_reason_has_its_meaning_cause_and_cure(first: str) -> None:
    _, meaning, cause, cure = REASON_ROWS[first]
    assert meaning
    assert cause
    assert cure


def test_the_page_says_which_reasons_need_a_person() -> None:
    marked = {re.sub(r"`(\w+)`.*", r"\1", first) for first in REASON_ROWS if "**Stalled**" in first}
    assert marked == {str(reason) for reason in NEEDS_A_PERSON}


def test_every_condition_is_explained() -> None:
    explained = {row[0].strip("`") for row in rows("reasons.md") if len(row) == 2}
    types = {value for name, value in vars(conditions).items() if name.isupper() and isinstance(value, str)}
    assert explained == types


def test_every_decision_is_explained_and_no_other() -> None:
    explained = {row[0].strip("`"): row for row in rows("reasons.md") if len(row) == 3}
    assert explained.keys() == {str(kind) for kind in DecisionType}
    assert all(cell for row in explained.values() for cell in row)


def test_the_api_page_is_what_the_types_say() -> None:
    assert api_reference.PAGE.read_text(encoding="utf-8") == api_reference.page(), "run `make crds`"


def test_the_api_page_has_every_field_of_the_crd() -> None:
    """From the CRD itself, not by the page's own walk."""
    (version,) = custom_resource_definition()["spec"]["versions"]
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    documented = {row[0].strip("`").rsplit(".", 1)[-1] for row in rows("api.md")}
    assert field_names(properties["spec"]) | field_names(properties["status"]) <= documented


def field_names(node: Any) -> set[str]:
    """Every name below any `properties`."""
    if not isinstance(node, dict):
        return set()
    below = {name for child in node.values() for name in field_names(child)}
    return below | set(node.get("properties", {}))


def test_the_rights_are_the_charts() -> None:
    text = (ROOT / "charts/millstream/templates/rbac.yaml").read_text(encoding="utf-8")
    role = yaml.safe_load(text.split("---\n")[0].replace("{{", "#").replace("labels:", "labels: #"))
    granted = {resource: ", ".join(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}
    section = (DOCS / "operator.md").read_text(encoding="utf-8").split("## Rights")[1].split("## Settings")[0]
    documented: dict[str, str] = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            names, verbs = (cell.strip() for cell in line.strip("|").split("|"))
            documented |= {name: verbs.split(" (")[0] for name in re.findall(r"`([\w/]+)`", names)}
    assert documented == granted


def test_every_setting_is_explained() -> None:
    section = (DOCS / "operator.md").read_text(encoding="utf-8").split("## Settings")[1]
    documented = set(re.findall(r"^\| `(MILLSTREAM_\w+)`", section, flags=re.MULTILINE))
    assert documented == set(re.findall(r"MILLSTREAM_\w+", settings.__doc__ or ""))


def test_the_fields_that_restart_nothing_are_those_of_the_hash() -> None:
    section = (DOCS / "operator.md").read_text(encoding="utf-8").split("## Pinned")[1].split("## Ready")[0]
    listed = section.split("not in the hash")[1].split("\n\n")[0]
    assert set(re.findall(r"`([\w.]+)`", listed)) == {*_paths(NOT_IN_PODS), *_paths(APPLIED_LIVE)}


def _paths(fields: dict[str, Any], parent: str = "") -> Iterator[str]:
    for name, below in fields.items():
        path = f"{parent}{to_camel(name)}"
        if isinstance(below, dict):
            yield from _paths(below, f"{path}.")
        else:
            yield path


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "README.md").read_text(encoding="utf-8")))
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} == listed
