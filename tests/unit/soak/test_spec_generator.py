"""Random specs: the same for the same seed, within the schema, and of every field."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.soak.spec_generator import MOST_REPLICAS, SpecGenerator, spec_schema
from tests.soak.valid_specs import draw, runnable, takes_anything

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return spec_schema(yaml.safe_load(next((ROOT / "crds").glob("*llmdeployments*.yaml")).read_text()))


def drawn(schema: dict[str, Any], seed: int, count: int) -> list[dict[str, Any]]:
    generator = SpecGenerator(schema, seed)
    return [generator.mutated(generator.base()) for _ in range(count)]


def test_a_seed_says_everything(schema: dict[str, Any]) -> None:
    assert drawn(schema, 7, 50) == drawn(schema, 7, 50)
    assert drawn(schema, 7, 50) != drawn(schema, 8, 50)


def test_nearly_every_spec_is_within_the_schema(schema: dict[str, Any]) -> None:
    """Not all: a few texts grow longer than they may. The API server refuses those, and that is a case, too."""
    validator = jsonschema.Draft202012Validator(json.loads(json.dumps(schema).replace('"x-kubernetes', '"x-k')))
    valid = [validator.is_valid(spec) for spec in drawn(schema, 1, 300)]
    assert sum(valid) > 270


def test_every_field_at_the_top_is_changed_sooner_or_later(schema: dict[str, Any]) -> None:
    assert {name for spec in drawn(schema, 1, 400) for name in spec} == set(schema["properties"])


def test_most_transitions_draw_what_the_operator_renders(schema: dict[str, Any]) -> None:
    """And every eighth whatever comes first: what the API server takes is decided where there is one."""

    async def admitted(_: dict[str, Any]) -> bool:
        return True

    async def all_of() -> list[bool]:
        found = []
        for number in range(64):
            generator = SpecGenerator(schema, f"3/{number}")
            base = generator.base()
            spec = await draw(generator, base, number, admitted)
            found.append(takes_anything(number) or (spec != base and runnable(spec)))
        return found

    assert all(asyncio.run(all_of()))
    assert sum(takes_anything(number) for number in range(64)) == 8
    assert runnable(SpecGenerator(schema, 1).base())
    assert not runnable({"model": {}})
    assert not runnable({"model": {"source": {}}}), "no kind of source, which a rule of the CRD refuses"


def test_replicas_stay_few(schema: dict[str, Any]) -> None:
    assert max(spec["replicas"] for spec in drawn(schema, 1, 300)) == MOST_REPLICAS
