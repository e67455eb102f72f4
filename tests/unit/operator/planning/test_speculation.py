"""N-grams on a CPU: rendered where a spec asks for them, chosen for nobody, and refused by name on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.api.load import parse
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.rendering.runtime_config import boot_config
from millstream_runtime.config import SpeculationMethod
from tests.support.llmdeployments import manifest

CPU = {"accelerator": {"type": "CPU"}}


def planned(**spec: Any) -> Plan:
    found = decide(parse(manifest(**spec)), PlanDefaults("runtime:1"), Facts())
    assert isinstance(found, Plan)
    return found


@pytest.mark.parametrize(("asked", "tokens"), [({}, 4), ({"maxDraftTokens": 16}, 16)])
def test_n_grams_on_a_cpu_reach_the_runtime(asked: dict[str, Any], tokens: int) -> None:
    plan = planned(**CPU, speculation={"method": "NGram"} | asked)
    assert plan.requires == ()
    boot = boot_config(plan)
    assert (boot.speculation_method, boot.draft_tokens) == (SpeculationMethod.N_GRAM, tokens)


@pytest.mark.parametrize("method", ["DraftModel", "EAGLE", "Medusa"])
def test_other_methods_are_refused_on_a_cpu(method: str) -> None:
    draft = {"draftModel": {"source": {"local": {"path": "demo-draft"}}}}
    plan = planned(**CPU, speculation={"method": method} | draft)
    assert plan.requires == (f"speculation={method}",)
    assert boot_config(plan).speculation_method is SpeculationMethod.DISABLED


def test_n_grams_on_a_gpu_are_refused() -> None:
    assert planned(accelerator={"type": "GPU"}, speculation={"method": "NGram"}).requires == ("speculation=NGram",)


@pytest.mark.parametrize("asked", [{}, {"tier": "Mid"}, {"workload": {"profile": "Code"}}, {"speculation": {}}])
def test_without_asking_a_cpu_does_not_speculate(asked: dict[str, Any]) -> None:
    plan = planned(**CPU, **asked)
    assert plan.speculation.method == "Disabled"
    assert boot_config(plan) == boot_config(planned(**CPU, **asked | {"speculation": {"method": "Disabled"}}))
