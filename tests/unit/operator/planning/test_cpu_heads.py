"""A draft head on a CPU: its bytes are in the plan, and one that does not suit the model is refused with the fix."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.catalog.gpu_names import parse_island
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.explaining.plan_table import plan_table
from millstream_operator.explaining.text import Style
from millstream_operator.inventory.node_kinds import inventory_of
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.requires import refusal
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.planning.sizing.draft_gain import draft_share
from tests.support.inspected_heads import head_shape
from tests.support.llmdeployments import deployment

ROOT = Path(__file__).resolve().parents[4]
SOURCE: dict[str, Any] = {"draftModel": {"source": {"local": {"path": "demo-eagle"}}}}
EAGLE: dict[str, Any] = {"method": "EAGLE"} | SOURCE
CHAT = replace(read_shape(json.loads((ROOT / "models/demo-chat/config.json").read_text())), dtype="FP32")
HEAD = replace(head_shape(), dtype="FP32")


def decided(head: ModelShape | None = HEAD, target: ModelShape = CHAT, memory: str = "4Gi", **spec: Any) -> Any:
    limited = {"containers": [{"name": "runtime", "resources": {"limits": {"memory": memory}}}]}
    owner = deployment(podTemplate={"spec": limited}, **{"speculation": EAGLE, **spec})
    facts = Facts(shape=target, draft_shape=head, draft_is_inspected=head is not None)
    return decide(owner, PlanDefaults("registry.example.com/runtime:1"), facts)


def planned(*args: Any, **spec: Any) -> Plan:
    found = decided(*args, **spec)
    assert isinstance(found, Plan), found.message
    return found


def pool_tokens(plan: Plan) -> int:
    (said,) = [one.reason for one in plan.reasons if one.field == "memory"]
    return int(said.split()[4].replace(",", ""))


def test_the_ledger_counts_weights_keys_and_hidden_states() -> None:
    alone, plan = planned(None, speculation={"method": "Disabled"}), planned()
    assert plan.requires == ()
    assert (plan.speculation.method, plan.speculation.max_draft_tokens) == ("EAGLE", 5)
    assert plan.memory is not None
    assert plan.memory.draft_weights_bytes == 475_648 * 4
    parts = plan.memory.as_dict()
    assert sum(size for part, size in parts.items() if part != "usableBytes") == parts["usableBytes"]
    # Numbers of a token: 5 layers of 2 x 4 heads of 64; the head's layer of 2 x 2 heads of 64, and one state of 256.
    target = CHAT.kv_elements_per_token()
    assert pool_tokens(plan) == pytest.approx(pool_tokens(alone) * target / (target + 2 * 2 * 64 + 256), rel=0.01)
    three = planned(head_shape("EAGLE-3", eagle_aux_hidden_state_layer_ids=[1, 2, 4]))
    assert pool_tokens(three) == pytest.approx(pool_tokens(alone) * target / (target + 256 + 3 * 256), rel=0.01)
    medusa = planned(head_shape("Medusa"), speculation=SOURCE | {"method": "Medusa"})
    assert (medusa.speculation.method, medusa.speculation.max_draft_tokens) == ("Medusa", 3)
    assert pool_tokens(medusa) == pytest.approx(pool_tokens(alone) * target / (target + 256), rel=0.01)


def test_the_page_says_draft_head() -> None:
    shown = plan_table("demo", planned(), Style())
    assert "draft head" in shown
    assert "draft model" not in shown
    found = decided(replace(HEAD, parameters=replace(HEAD.parameters, mlp=700_000_000)), _bigger(), "5Gi")
    assert isinstance(found, Infeasible)
    assert "The draft head takes 2.6 GiB for its weights." in found.message
    assert ("speculation.method", "NGram") in {(fix.field, fix.value) for fix in found.fixes}


def _bigger() -> ModelShape:
    return replace(CHAT, parameters=replace(CHAT.parameters, mlp=800_000_000))


@pytest.mark.parametrize(
    ("head", "spec", "said"),
    [
        (
            head_shape(hidden_size=512),
            EAGLE,
            "The hidden_size of the EAGLE-1 head (speculation.draftModel) is 512, and the model's is 256: name a head "
            "that was trained with this model, or leave speculation out.",
        ),
        (head_shape(vocab_size=2047), EAGLE, "The vocab_size of the EAGLE-1 head (speculation.draftModel) is 2047"),
        (
            head_shape("EAGLE-3", target_hidden_size=512),
            EAGLE,
            "The target_hidden_size of the EAGLE-3 head (speculation.draftModel) is 512",
        ),
        (
            head_shape("EAGLE-3", eagle_aux_hidden_state_layer_ids=[1, 2, 60]),
            EAGLE,
            "The EAGLE-3 head (speculation.draftModel) reads hidden states before the layers 1, 2, 60, and the model "
            "has 5",
        ),
        (
            head_shape("Medusa", vocab_size=32000),
            SOURCE | {"method": "Medusa"},
            "The vocab_size of the Medusa head (speculation.draftModel) is 32000",
        ),
        (
            head_shape(elements=9_000_000),
            EAGLE,
            "The weights of speculation.draftModel take 36.0 MB, more than the target's 25.7 MB",
        ),
        (
            HEAD,
            EAGLE | {"draftModel": SOURCE["draftModel"] | {"quantizationMethod": "AWQ"}},
            "speculation.draftModel.quantizationMethod is AWQ, but draft heads have None: leave it out.",
        ),
        (CHAT, EAGLE, "speculation.method is EAGLE, but speculation.draftModel is a model: name a head of this model."),
    ],
    ids=["hidden", "vocabulary", "target-hidden", "layers", "medusa", "larger", "format", "model"],
)
def test_a_head_that_does_not_suit_the_model_is_refused_with_the_fix(
    head: ModelShape, spec: dict[str, Any], said: str
) -> None:
    found = decided(head, speculation=spec)
    assert isinstance(found, Infeasible)
    assert found.constraint == "speculation"
    assert found.message.startswith(said)
    assert [(fix.field, fix.value) for fix in found.fixes] == [("speculation.method", "NGram")]


@pytest.mark.parametrize(
    ("speculation", "requires", "said"),
    [
        ({"method": "EAGLE"}, "draftHead=EAGLE", "the EAGLE head that drafts (name its source as speculation.draftMod"),
        (EAGLE | {"acceptance": "Distribution"}, "headAcceptance=Distribution", "leave speculation.acceptance out"),
        (
            EAGLE | {"tuning": {"dataset": {"configMapRef": {"name": "data", "key": "p.jsonl"}}}},
            "headTuning=EAGLE",
            "leave speculation.tuning out",
        ),
    ],
)
def test_what_a_head_cannot_have_is_refused_and_not_ignored(
    speculation: dict[str, Any], requires: str, said: str
) -> None:
    hub = {"source": {"huggingFace": {"repository": "org/target"}}, "cache": {"size": "20Gi"}}
    model = hub if "tuning" in speculation else {"source": {"local": {"path": "demo-chat"}}}
    plan = planned(speculation=speculation, model=model)
    assert plan.requires == (requires,)
    assert said in (refusal(plan.requires) or "")


@pytest.mark.parametrize("kind", ["EAGLE-1", "EAGLE-3", "Medusa"])
def test_a_gpu_counts_the_head_and_refuses_it(kind: str) -> None:
    method = "Medusa" if kind == "Medusa" else "EAGLE"
    target = known_shape("meta-llama/Llama-3.1-8B-Instruct")
    assert target is not None
    head = head_shape(
        kind, hidden_size=4096, vocab_size=target.vocab_size, num_attention_heads=32, elements=250_000_000
    )
    facts = Facts(shape=target, draft_shape=head, draft_is_inspected=True)
    gpus = inventory_of([parse_island(facts.catalog, "A100-80GB:1")])
    owner = deployment(accelerator={"type": "GPU"}, speculation=SOURCE | {"method": method})
    found = decide(owner, PlanDefaults("image:1"), replace(facts, inventory=gpus))
    assert isinstance(found, Plan)
    assert found.requires == (f"speculation={method}",)
    assert found.memory is not None
    assert found.memory.draft_weights_bytes == 2 * 250_000_000
    other = decide(owner, PlanDefaults("image:1"), replace(facts, draft_shape=HEAD, inventory=gpus))
    assert isinstance(other, Infeasible)
    assert "hidden_size of the EAGLE-1 head" in other.message
    without = decide(deployment(accelerator={"type": "GPU"}), PlanDefaults("image:1"), replace(facts, inventory=gpus))
    assert isinstance(without, Plan)
    assert without.predicted is not None
    assert found.predicted is not None
    tokens = [plan.predicted.kv_cache_tokens for plan in (without, found) if plan.predicted is not None]
    assert tokens[1] < tokens[0], "a token takes its hidden states, too"


def test_a_draft_reads_the_head_and_the_output_head_that_it_shares() -> None:
    total = CHAT.parameters.total
    assert CHAT.parameters.head == 0, "it is tied, so a decode reads all weights"
    assert draft_share(CHAT, HEAD) == pytest.approx((475_648 + 2048 * 256) / total)
    assert draft_share(CHAT, replace(head_shape("Medusa"), dtype="FP32")) == pytest.approx(475_648 / 3 / total)
    assert draft_share(CHAT, replace(head_shape("EAGLE-3"), dtype="FP32")) == pytest.approx(475_648 / total)


def test_the_governor_of_a_head_is_applied_live() -> None:
    modes: tuple[dict[str, Any], ...] = ({}, {"governor": {"mode": "Observe"}}, {"governor": {"mode": "Disabled"}})
    assert len({input_hash(deployment(speculation=EAGLE | mode)) for mode in modes}) == 1
    other = deployment(speculation=EAGLE | {"maxDraftTokens": 3})
    assert input_hash(other) != input_hash(deployment(speculation=EAGLE))


@pytest.mark.parametrize(("asked", "planned_tokens"), [(None, 3), (2, 2), (3, 3), (16, 3)])
def test_medusa_proposes_no_more_tokens_than_there_are_heads(asked: int | None, planned_tokens: int) -> None:
    tokens = {"maxDraftTokens": asked} if asked is not None else {}
    plan = planned(head_shape("Medusa"), speculation=SOURCE | {"method": "Medusa"} | tokens)
    assert plan.speculation.max_draft_tokens == planned_tokens
    said = next(one.reason for one in plan.reasons if one.field == "speculation")
    assert ("The folder has 3 heads" in said) is (planned_tokens != asked)
