"""N-grams on a CPU: rendered where a spec asks for them, by workload for Auto, refused on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.api.load import parse
from millstream_operator.catalog.read_shape import read_shape_file
from millstream_operator.planning.choices.speculation import choose_speculation
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.planning.requires import refusal
from millstream_operator.planning.sizing.draft_gain import draft_share, most_speedup_percent
from millstream_operator.planning.sizing.roofline import SpeculationSpeed
from millstream_operator.rendering.runtime_config import boot_config
from millstream_runtime.config import CAPABILITIES, SpeculationMethod
from tests.support.llmdeployments import manifest

CPU: dict[str, Any] = {"accelerator": {"type": "CPU"}}
DRAFT: dict[str, Any] = {"draftModel": {"source": {"local": {"path": "demo-draft"}}}}
MODELS = Path(__file__).resolve().parents[4] / "models"


def planned(facts: Facts | None = None, **spec: Any) -> Plan:
    found = decide(parse(manifest(**spec)), PlanDefaults("runtime:1"), facts or Facts())
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize(("asked", "tokens"), [({}, 4), ({"maxDraftTokens": 16}, 16)])
def test_n_grams_on_a_cpu_reach_the_runtime(asked: dict[str, Any], tokens: int) -> None:
    plan = planned(**CPU, speculation={"method": "NGram"} | asked)
    assert plan.requires == ()
    boot = boot_config(plan)
    assert (boot.speculation_method, boot.draft_tokens) == (SpeculationMethod.N_GRAM, tokens)


@pytest.mark.parametrize("method", ["EAGLE", "Medusa"])
def test_a_head_is_refused_on_a_gpu_with_the_methods_that_are_there(method: str) -> None:
    head = {"draftModel": {"source": {"local": {"path": "demo-eagle"}}}}
    plan = planned(accelerator={"type": "GPU"}, speculation={"method": method} | head)
    assert plan.requires == (f"speculation={method}",)
    assert (
        refusal(plan.requires) == f"This version cannot run the plan: it lacks speculation by {method} on a GPU (set "
        f"speculation.method to DraftModel or NGram, or accelerator.type to CPU) (speculation={method})."
    )
    assert boot_config(plan).speculation_method is SpeculationMethod.DISABLED


@pytest.mark.parametrize(("asked", "tokens"), [({}, 5), ({"maxDraftTokens": 2}, 2)])
def test_a_draft_model_on_a_cpu_reaches_the_runtime(asked: dict[str, Any], tokens: int) -> None:
    plan = planned(Facts(draft_is_inspected=True), **CPU, speculation=DRAFT | asked)
    assert plan.requires == ()
    boot = boot_config(plan)
    assert (boot.speculation_method, boot.draft_tokens) == (SpeculationMethod.DRAFT_MODEL, tokens)
    assert (boot.model, boot.draft_model) == ("/models/demo-chat", "/models/demo-draft")


def test_a_gpu_drafts_where_it_is_asked_to_and_not_by_itself() -> None:
    """No GPU has measured what drafts gain."""
    for asked in ({"method": "NGram"}, DRAFT):
        plan = planned(Facts(draft_is_inspected=True), accelerator={"type": "GPU"}, speculation=asked)
        assert plan.requires == ()
        assert boot_config(plan).speculation_method == asked.get("method", "DraftModel")
    for fields in ({"tier": "Startup"}, {"speculation": {"method": "Auto"}, "workload": {"profile": "Code"}}):
        plan = planned(Facts(), accelerator={"type": "GPU"}, **fields)
        assert boot_config(plan).speculation_method is SpeculationMethod.DISABLED
        assert any("speculation.method NGram asks for them" in one.reason for one in plan.rejected)


AUTO: dict[str, Any] = {"speculation": {"method": "Auto"}}


@pytest.mark.parametrize(
    ("profile", "method"),
    [("Code", "NGram"), ("RAG", "NGram"), ("Chat", "Disabled"), ("Math", "Disabled"), ("Creative", "Disabled"),
     ("Batch", "Disabled"), ("Edge", "Disabled"), (None, "Disabled")],
)  # fmt: skip
def test_auto_follows_the_workload(profile: str | None, method: str) -> None:
    workload: dict[str, Any] = {"workload": {"profile": profile}} if profile else {}
    same: tuple[dict[str, Any], ...] = (AUTO, {"speculation": {}})
    for asked in same:
        plan = planned(**CPU, **workload, **asked)
        assert plan.speculation.method == method
        assert plan.requires == ()
    choice = choose_speculation(parse(manifest(**CPU, **workload, speculation=DRAFT)).spec, CAPABILITIES)
    assert choice.plan.method == "DraftModel", "a draft that is named is used: no field is accepted and ignored"


@pytest.mark.parametrize("device", ["CPU", "GPU"])
@pytest.mark.parametrize("profile", ["Creative", "Batch", "Edge", "Math", "Chat", None])
def test_a_number_of_drafts_without_a_method_asks_for_n_grams(profile: str | None, device: str) -> None:
    """No field is accepted and then ignored: not where a profile has no drafts by default, either."""
    workload: dict[str, Any] = {"workload": {"profile": profile}} if profile else {}
    plan = planned(accelerator={"type": device}, **workload, speculation={"maxDraftTokens": 3})
    assert (plan.speculation.method, plan.speculation.max_draft_tokens, plan.requires) == ("NGram", 3, ())
    (boot,) = [boot_config(plan)]
    assert (boot.speculation_method, boot.draft_tokens) == (SpeculationMethod.N_GRAM, 3)
    assert planned(accelerator={"type": device}, **workload, speculation={"method": "Disabled"}).requires == ()


def test_auto_chooses_only_what_the_device_can() -> None:
    code: dict[str, Any] = {"workload": {"profile": "Code"}} | AUTO
    assert planned(**code, accelerator={"type": "GPU"}).speculation.method == "Disabled"
    without = replace(CAPABILITIES, cpu_speculation_methods=frozenset({"Disabled"}))
    assert choose_speculation(parse(manifest(**CPU, **code)).spec, without).plan.method == "Disabled"
    only_gpus = replace(without, speculation_methods=frozenset({"Disabled", "NGram"}))
    assert choose_speculation(parse(manifest(**CPU, **code)).spec, only_gpus).plan.method == "Disabled"


def test_the_plan_says_what_drafts_gain_at_most_and_what_that_assumes() -> None:
    plan = planned(**CPU, speculation={"method": "NGram"})
    # 1 + 0.4 + 0.16 + 0.064 + 0.0256 tokens per check
    assert plan.status_plan()["speculation"] == {
        "method": "NGram",
        "maxDraftTokens": 4,
        "assumedAcceptancePercent": 40,
        "mostSpeedupPercent": 165,
    }
    (said,) = [one.reason for one in plan.reasons if one.field == "speculation"]
    assert "At most 1.65 times" in said
    assert "40 % of the drafts are accepted (assumed)" in said


def test_a_draft_model_gains_less_the_larger_it_is() -> None:
    chat, small = (read_shape_file(MODELS / name / "config.json") for name in ("demo-chat", "demo-draft"))
    drafting = SpeculationSpeed(draft_tokens=5, acceptance=0.7)
    tokens = (1 - 0.7**6) / (1 - 0.7)
    # Both tie head and embedding; norms are read in float32, all else in 16 bits.
    of_small, of_chat = (shape.parameters.total + shape.parameters.norms for shape in (small, chat))
    share = of_small / of_chat
    assert draft_share(chat, small) == pytest.approx(share)
    assert most_speedup_percent(drafting, share) == round(100 * tokens / (1 + 5 * share))
    assert most_speedup_percent(drafting, 1.0) == round(100 * tokens / 6)
    plan = planned(Facts(shape=chat, draft_shape=small), **CPU, speculation=DRAFT)
    assert plan.speculation.most_speedup_percent == most_speedup_percent(drafting, share)
    assert planned(**CPU, speculation=DRAFT).speculation.most_speedup_percent is None, "shapes are not known"


@pytest.mark.parametrize("asked", [{}, {"tier": "Mid"}, {"workload": {"profile": "Code"}}, {"speculation": {}}])
def test_without_asking_a_cpu_does_not_speculate(asked: dict[str, Any]) -> None:
    plan = planned(**CPU, **asked)
    assert plan.speculation.method == "Disabled"
    assert boot_config(plan) == boot_config(planned(**CPU, **asked | {"speculation": {"method": "Disabled"}}))
