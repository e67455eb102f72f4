"""A draft model on a CPU: its bytes are in the plan, and one that does not suit the model is refused with the fix."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.choices.draft_fit import vocabulary_problem
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.sizing.cpu_memory import cpu_weights_bytes
from tests.support.llmdeployments import deployment

ROOT = Path(__file__).resolve().parents[4]
DRAFTING = {"speculation": {"draftModel": {"source": {"local": {"path": "demo-draft"}}}}}
GIB = 1 << 30


def config(name: str, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "models" / name / "config.json").read_text())
    return found | changes


# In float32, so that bytes are as they are counted below.
CHAT, SMALL = (replace(read_shape(config(name)), dtype="FP32") for name in ("demo-chat", "demo-draft"))


def decided(
    target: ModelShape = CHAT, draft: ModelShape | None = SMALL, memory: str = "4Gi", **spec: Any
) -> Plan | Infeasible:
    limited = {"containers": [{"name": "runtime", "resources": {"limits": {"memory": memory}}}]}
    owner = deployment(podTemplate={"spec": limited}, **{**DRAFTING, **spec})
    facts = Facts(shape=target, draft_shape=draft, draft_is_inspected=draft is not None)
    return decide(owner, PlanDefaults("registry.example.com/runtime:1"), facts)


def planned(*args: Any, **spec: Any) -> Plan:
    found = decided(*args, **spec)
    assert isinstance(found, Plan), found.message
    return found


def test_the_ledger_counts_weights_and_keys_and_values_of_the_draft() -> None:
    alone, with_draft = planned(speculation={"method": "Disabled"}), planned()
    assert with_draft.requires == ()
    assert (with_draft.speculation.method, with_draft.speculation.max_draft_tokens) == ("DraftModel", 5)
    assert alone.memory is not None
    assert with_draft.memory is not None
    assert alone.memory.draft_weights_bytes == 0
    assert with_draft.memory.draft_weights_bytes == cpu_weights_bytes(SMALL)
    parts = with_draft.memory.as_dict()
    assert sum(size for part, size in parts.items() if part != "usableBytes") == parts["usableBytes"]
    # 5 and 2 layers with 4 heads of 64, in float32: 7 layers' bytes per token instead of 5.
    tokens = [pool_tokens(plan) for plan in (alone, with_draft)]
    assert tokens[1] == pytest.approx(tokens[0] * 5 / 7, rel=0.01)


def pool_tokens(plan: Plan) -> int:
    (said,) = [one.reason for one in plan.reasons if one.field == "memory"]
    return int(said.split()[4].replace(",", ""))


def test_a_model_with_windows_has_no_groups_beside_a_draft_unless_it_is_asked_to() -> None:
    """As the runtime does: a draft's pool has a block for each of the model's, whichever group it is of."""
    gemma = read_shape(json.loads((ROOT / "tests/data/model_configs/gemma-3-1b.json").read_text()))
    draft = replace(SMALL, vocab_size=gemma.vocab_size)
    memory, engine = "8Gi", {"maxModelLen": 8192}
    grouped, one_table = (
        planned(gemma, shape, memory, engine=engine, **(DRAFTING if shape else {"speculation": {"method": "NGram"}}))
        for shape in (None, draft)
    )
    asked = planned(gemma, draft, memory, engine=engine | {"hybridKvCacheManager": "Enabled"})
    assert pool_tokens(grouped) > pool_tokens(asked) > pool_tokens(one_table)


def test_a_request_of_memory_covers_both() -> None:
    large, draft = replace(CHAT), replace(SMALL)
    asked = [
        planned(large, shape, "8Gi", **({} if shape else {"speculation": {"method": "Disabled"}})).resources.requests
        for shape in (None, draft)
    ]
    assert asked[0] == asked[1], "both fit into the smallest request"
    big = replace(SMALL, parameters=replace(SMALL.parameters, mlp=700_000_000))
    bigger = replace(CHAT, parameters=replace(CHAT.parameters, mlp=800_000_000))
    alone = planned(bigger, None, "16Gi", speculation={"method": "Disabled"}).resources.requests["memory"]
    both = planned(bigger, big, "16Gi").resources.requests["memory"]
    assert int(both[:-2]) - int(alone[:-2]) == pytest.approx(cpu_weights_bytes(big) >> 20, abs=256)


@pytest.mark.parametrize(
    ("target", "draft", "spec", "said"),
    [
        (
            CHAT,
            replace(SMALL, vocab_size=32000),
            {},
            "The draft's vocabulary of 32000 tokens is not the target's of 2048: name a smaller model with the "
            "target's tokenizer, or leave speculation out.",
        ),
        (
            SMALL,
            CHAT,
            {},
            "The weights of speculation.draftModel take 25.7 MB, more than the target's 4.2 MB: name a smaller model",
        ),
        (
            CHAT,
            SMALL,
            {"speculation": {"draftModel": {**DRAFTING["speculation"]["draftModel"], "quantizationMethod": "AWQ"}}},
            "speculation.draftModel.quantizationMethod is AWQ, but the draft is stored as None: leave it out",
        ),
    ],
    ids=["vocabulary", "larger", "format"],
)
def test_a_draft_that_does_not_suit_the_model_is_refused_with_the_fix(
    target: ModelShape, draft: ModelShape, spec: dict[str, Any], said: str
) -> None:
    found = decided(target, draft, **spec)
    assert isinstance(found, Infeasible)
    assert found.constraint == "speculation"
    assert found.message.startswith(said)
    assert [(fix.field, fix.value) for fix in found.fixes] == [("speculation.method", "NGram")]


def test_embeddings_that_are_padded_to_another_size_may_hold_the_same_tokens() -> None:
    """Of Qwen 2.5 with 7 and with 0.5 billion parameters; the runtime compares the tokens."""
    target, draft = (replace(SMALL, vocab_size=size) for size in (152_064, 151_936))
    assert vocabulary_problem(target, draft) is None
    assert vocabulary_problem(target, replace(SMALL, vocab_size=128_256)) is not None


def test_a_draft_for_which_there_is_no_memory_is_named_and_can_be_left_out() -> None:
    big = replace(SMALL, parameters=replace(SMALL.parameters, mlp=700_000_000))
    bigger = replace(CHAT, parameters=replace(CHAT.parameters, mlp=800_000_000))
    found = decided(bigger, big, "5Gi")
    assert isinstance(found, Infeasible)
    assert found.constraint == "memory"
    assert "GiB are missing. The draft model takes 2.6 GiB for its weights." in found.message
    fixes = {(fix.field, fix.value) for fix in found.fixes}
    assert ("speculation.method", "NGram") in fixes
    assert any(field.endswith("limits.memory") for field, _ in fixes)
    assert isinstance(decided(bigger, None, "5Gi", speculation={"method": "Disabled"}), Plan)


def test_a_draft_in_a_form_that_the_runtime_cannot_load_is_named() -> None:
    marlin = config("demo-draft", quantization_config={"quant_method": "awq", "bits": 4, "version": "marlin"})
    assert planned(CHAT, read_shape(marlin)).requires == ("checkpointFormat=quantization_config.version 'marlin'",)
