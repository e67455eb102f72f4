"""One row per model family: the code, the planner's samples and the docs have what the table says, and no more."""

from __future__ import annotations

import json
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from hack.reference import model_families as families_reference
from millstream_operator.catalog.read_shape import read_shape
from millstream_runtime.config import CAPABILITIES
from millstream_runtime.model_families import FAMILIES, RUNNABLE, ModelFamily, family_of

ROOT = Path(__file__).resolve().parents[3]
CODE = ROOT / "runtime" / "millstream_runtime" / "models" / "families"
SAMPLES = ROOT / "tests" / "data" / "model_configs"


def test_no_two_rows_share_a_name() -> None:
    names = Counter(name for row in FAMILIES for name in (row.model_type, *row.aliases))
    architectures = Counter(row.architecture for row in FAMILIES)
    assert [name for name, count in (names + architectures).items() if count > 1] == []


def test_every_file_of_families_is_named_by_a_row_and_every_named_file_exists() -> None:
    files = {path.stem for path in CODE.glob("*.py")} - {"__init__"}
    assert {row.module for row in RUNNABLE} == files


@pytest.mark.parametrize("row", RUNNABLE, ids=lambda row: row.model_type)
def test_a_runnable_family_has_its_two_functions_and_a_line_for_the_docs(row: ModelFamily) -> None:
    module = import_module(f"millstream_runtime.models.families.{row.module}")
    assert callable(module.read_config)
    assert callable(module.build)
    assert row.beyond_llama


def test_the_runtime_is_capable_of_the_runnable_families() -> None:
    assert CAPABILITIES.model_families == {row.model_type for row in FAMILIES if row.module is not None}


def test_the_planner_counts_a_published_model_of_every_family() -> None:
    """tests/unit/operator/catalog/test_model_shape.py compares those counts with `transformers`."""
    configs = [json.loads(path.read_text(encoding="utf-8")) for path in SAMPLES.glob("*.json")]
    sampled = {read_shape(config).family for config in configs}
    missing = {row.model_type for row in FAMILIES} - sampled
    assert not missing, f"tests/data/model_configs has no config.json of {missing}"


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.model_type)
def test_a_family_is_found_by_its_name_and_its_aliases(row: ModelFamily) -> None:
    assert {family_of(name) for name in (row.model_type, *row.aliases)} == {row}


def test_the_table_of_the_docs_is_current() -> None:
    text = families_reference.PAGE.read_text(encoding="utf-8")
    assert families_reference.page(text) == text, "run `make crds`"
