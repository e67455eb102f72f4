"""A CPU replica of a model that mixes windows is planned with the block tables that its runtime will have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.rendering.runtime_config import boot_config
from millstream_runtime.config import CAPABILITIES
from millstream_runtime.config_files import dump
from tests.support.llmdeployments import deployment

SAMPLES = Path(__file__).resolve().parents[3] / "data" / "model_configs"
GEMMA = replace(read_shape(json.loads((SAMPLES / "gemma-3-1b.json").read_text())), dtype="FP32")
DEFAULTS = PlanDefaults("registry.example.com/runtime:2")
# Room for a request of 32,768 tokens where 22 of 26 layers keep 512 of them, and not where all keep all.
MEMORY = {"spec": {"containers": [{"name": "runtime", "resources": {"limits": {"memory": "6400Mi"}}}]}}


def decided(facts: Facts | None = None, image: str | None = None, **engine: Any) -> Plan | Infeasible:
    spec: dict[str, Any] = {"runtime": {"image": image}} if image else {}
    owner = deployment(podTemplate=MEMORY, engine={"maxModelLen": 32768, **engine}, **spec)
    return decide(owner, DEFAULTS, facts or Facts(shape=GEMMA))


def test_groups_are_planned_where_the_runtime_has_them_by_default() -> None:
    plan = decided()
    assert isinstance(plan, Plan), plan.message
    assert not plan.requires
    assert "hybrid" not in dump(boot_config(plan)), "so the file is one that every runtime reads"
    [pool] = [one.reason for one in plan.reasons if one.field == "memory"]
    assert pool == "The KV pool holds 75,451 tokens of the container's memory."  # without groups 17,083


@pytest.mark.parametrize(
    ("asked", "runtime", "image"),
    [
        ({"hybridKvCacheManager": "Disabled"}, CAPABILITIES, None),
        ({}, replace(CAPABILITIES, kv_layouts=frozenset({"OneTable"})), None),
        ({}, CAPABILITIES, "registry.example.com/runtime:1"),
    ],
    ids=["the spec says no", "the runtime has none", "the image that the spec names may have none"],
)
def test_one_block_table_is_planned_otherwise_and_the_fix_makes_room_for_it(
    asked: dict[str, Any], runtime: Any, image: str | None
) -> None:
    found = decided(Facts(shape=GEMMA, runtime=runtime, choosable=runtime), image, **asked)
    assert isinstance(found, Infeasible)
    assert found.constraint == "memory"
    assert "has room for 17083 tokens" in found.message
    [limit] = [fix.value for fix in found.fixes if fix.field.endswith("limits.memory")]
    assert limit == "8Gi"


def test_an_image_that_the_spec_names_has_groups_where_the_spec_asks_for_them() -> None:
    plan = decided(image="registry.example.com/runtime:1", hybridKvCacheManager="Enabled")
    assert isinstance(plan, Plan), plan.message
    assert boot_config(plan).enable_hybrid_kv_cache_manager is True
    assert plan.status_plan()["engine"]["hybridKvCacheManager"] == "Enabled"
