"""A replica on a CPU is planned with the 16 bits of its checkpoint, and pods of earlier plans keep float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.api.load import ManifestError, parse
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.requires import refusal
from millstream_operator.rendering.runtime_config import boot_config
from millstream_runtime.config import CAPABILITIES, DType
from millstream_runtime.config_files import dump
from tests.support.llmdeployments import deployment, manifest

ROOT = Path(__file__).resolve().parents[4]
CHAT = read_shape(json.loads((ROOT / "models/demo-chat/config.json").read_text()))
IMAGE = "registry.example.com/runtime:1"
OLDER = replace(CAPABILITIES, cpu_weight_dtypes=frozenset({"FP32"}))


def decided(
    shape: ModelShape | None, facts: Facts | None = None, memory: str = "4Gi", **spec: Any
) -> Plan | Infeasible:
    limited = {"containers": [{"name": "runtime", "resources": {"limits": {"memory": memory}}}]}
    owner = deployment(accelerator={"type": "CPU"}, podTemplate={"spec": limited}, **spec)
    return decide(owner, PlanDefaults(IMAGE), facts or Facts(shape=shape))


def planned(shape: ModelShape | None, facts: Facts | None = None, **spec: Any) -> Plan:
    plan = decided(shape, facts, **spec)
    assert isinstance(plan, Plan), plan.message
    return plan


@pytest.mark.parametrize(
    ("checkpoint", "words", "boot"),
    [("BF16", "BF16", DType.BFLOAT16), ("FP16", "FP16", DType.FLOAT16), ("FP32", "FP32", DType.AUTO)],
)
def test_the_dtype_is_the_checkpoints(checkpoint: str, words: str, boot: DType) -> None:
    plan = planned(replace(CHAT, dtype=checkpoint))
    assert plan.summary == f"CPU TP1 {words}"
    assert boot_config(plan).dtype is boot


def test_weights_of_16_bits_take_half_the_memory() -> None:
    half, single = (planned(replace(CHAT, dtype=dtype)).memory for dtype in ("BF16", "FP32"))
    assert half is not None
    assert single is not None
    in_16_bits = CHAT.parameters.total - CHAT.parameters.norms  # norms are float32 in either
    saved = single.weights_bytes + single.embeddings_bytes - half.weights_bytes - half.embeddings_bytes
    assert saved == 2 * in_16_bits
    assert half.weights_bytes + half.embeddings_bytes == 2 * in_16_bits + 4 * CHAT.parameters.norms


@pytest.mark.parametrize(
    ("facts", "spec"),
    [
        (Facts(shape=None), {}),
        (Facts(shape=CHAT, runtime=OLDER, choosable=OLDER), {}),
        (Facts(shape=CHAT), {"runtime": {"image": "registry.example.com/own:1"}}),
        (Facts(shape=replace(CHAT, is_gguf=True)), {}),
    ],
    ids=["not inspected", "a runtime that widens no weights", "an image that the spec names", "a GGUF file"],
)
def test_float32_is_planned_where_16_bits_are_not_known_to_work(facts: Facts, spec: dict[str, Any]) -> None:
    plan = planned(None, facts, **spec)
    assert plan.summary == "CPU TP1 FP32"
    assert '"dtype": "auto"' in dump(boot_config(plan)), "as in every boot.json of earlier plans"


def test_a_draft_model_follows_its_own_checkpoint() -> None:
    draft = read_shape(json.loads((ROOT / "models/demo-draft/config.json").read_text()))
    source: dict[str, Any] = {"local": {"path": "demo-draft"}}
    spec: dict[str, Any] = {"speculation": {"method": "DraftModel", "draftModel": {"source": source}}}
    for dtype, num_bytes in (("BF16", 2), ("FP32", 4)):
        facts = Facts(shape=CHAT, draft_shape=replace(draft, dtype=dtype), draft_is_inspected=True)
        memory = planned(None, facts, **spec).memory
        assert memory is not None
        norms = draft.parameters.norms
        assert memory.draft_weights_bytes == num_bytes * (draft.parameters.total - norms) + 4 * norms


@pytest.mark.parametrize("target", ["FP32", "GGUF", "engine.dtype float32"])
def test_a_draft_model_is_float32_where_its_target_is(target: str) -> None:
    """So the runtime holds it (`shard_config.draft_arithmetic`)."""
    draft = read_shape(json.loads((ROOT / "models/demo-draft/config.json").read_text()))
    shape = replace(CHAT, dtype="FP32" if target == "FP32" else "BF16", is_gguf=target == "GGUF")
    spec: dict[str, Any] = {"speculation": {"method": "DraftModel", "draftModel": {"source": {"local": {"path": "d"}}}}}
    spec |= {"engine": {"dtype": "float32"}} if target.startswith("engine") else {}
    memory = planned(None, Facts(shape=shape, draft_shape=draft, draft_is_inspected=True), **spec).memory
    assert memory is not None
    assert memory.draft_weights_bytes == 4 * draft.parameters.total


@pytest.mark.parametrize(
    ("asked", "words", "boot"),
    [
        ("float32", "FP32", DType.FLOAT32),
        ("float16", "FP16", DType.FLOAT16),
        ("bfloat16", "BF16", DType.BFLOAT16),
        ("auto", "BF16", DType.BFLOAT16),
    ],
)
def test_the_spec_names_a_dtype(asked: str, words: str, boot: DType) -> None:
    plan = planned(CHAT, engine={"dtype": asked})
    assert (plan.summary, boot_config(plan).dtype) == (f"CPU TP1 {words}", boot)
    assert plan.memory is not None
    norms = CHAT.parameters.norms
    width = 4 if asked == "float32" else 2
    assert plan.memory.weights_bytes + plan.memory.embeddings_bytes == (
        width * (CHAT.parameters.total - norms) + 4 * norms
    )
    assert plan.status_plan()["engine"].get("dtype") == (None if asked == "auto" else asked)
    assert any(reason.field == "engine.dtype" for reason in plan.reasons)


def test_a_dtype_that_the_spec_names_holds_for_an_image_of_its_own_and_a_model_that_was_not_inspected() -> None:
    for facts, spec in ((Facts(shape=CHAT), {"runtime": {"image": "registry.example.com/own:1"}}), (Facts(), {})):
        plan = planned(None, facts, engine={"dtype": "bfloat16"}, **spec)
        assert (plan.summary, boot_config(plan).dtype) == ("CPU TP1 BF16", DType.BFLOAT16)


def test_a_dtype_that_the_runtime_does_not_hold_is_refused_by_name() -> None:
    plan = planned(None, Facts(shape=CHAT, runtime=OLDER, choosable=OLDER), engine={"dtype": "bfloat16"})
    assert plan.requires == ("dtype=BF16",)
    assert "leave engine.dtype out" in (refusal(plan.requires) or "")


def test_a_dtype_is_for_a_cpu_alone() -> None:
    stored = manifest(accelerator={"type": "GPU"}, engine={"dtype": "float32"})
    with pytest.raises(ManifestError, match="dtype needs accelerator"):
        parse(stored)


def test_a_pod_learns_the_length_that_was_planned_where_the_spec_names_none() -> None:
    """Nine tenths of the pool's tokens or of the model's length; an image of its own may not know the field."""
    shape = replace(CHAT, max_position_embeddings=1 << 17)
    plan = planned(shape, memory="1200Mi")
    assert plan.memory is not None
    tokens = plan.memory.kv_cache_bytes // (shape.kv_elements_per_token() * 4)
    assert boot_config(plan).planned_model_len == tokens * 9 // 10
    assert boot_config(planned(CHAT)).planned_model_len == CHAT.max_position_embeddings * 9 // 10
    assert "planned_model_len" not in dump(boot_config(planned(replace(CHAT, dtype="FP32")))), "as in earlier plans"
    for spec in ({"engine": {"maxModelLen": 512}}, {"runtime": {"image": "registry.example.com/own:1"}}):
        assert "planned_model_len" not in dump(boot_config(planned(CHAT, **spec)))
    assert "planned_model_len" not in dump(boot_config(planned(None, Facts())))


def test_a_limit_that_holds_float32_no_more_holds_the_checkpoints_16_bits() -> None:
    big = replace(CHAT, parameters=replace(CHAT.parameters, mlp=900_000_000))
    assert isinstance(decided(replace(big, dtype="FP32"), memory="3500Mi"), Infeasible)
    assert isinstance(decided(big, memory="3500Mi"), Plan)
