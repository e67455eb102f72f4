"""The memory of a CPU replica is the limit that its container gets, however the spec says it."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.quantity import amount
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import Infeasible, Plan, PlanDefaults
from millstream_operator.planning.planner import decide
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.pod_template import pod_template
from tests.support.llmdeployments import deployment
from tests.unit.operator.planning.test_cpu_drafts import CHAT

GIB = 1 << 30


def owner(**resources: Any) -> LLMDeployment:
    return deployment(podTemplate={"spec": {"containers": [{"name": "runtime", "resources": resources}]}})


def decided(found: LLMDeployment) -> Plan | Infeasible:
    return decide(found, PlanDefaults("runtime:1"), Facts(shape=CHAT))


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "neither": ({}, 4 * GIB),
    "a request alone raises the limit": ({"requests": {"memory": "8Gi"}}, 8 * GIB),
    "a smaller request alone keeps it": ({"requests": {"memory": "1Gi"}}, 4 * GIB),
    "a limit alone": ({"limits": {"memory": "2Gi"}}, 2 * GIB),
    "a limit with a request": ({"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}}, 2 * GIB),
    "another resource": ({"limits": {"cpu": "2"}, "requests": {"cpu": "1"}}, 4 * GIB),
    **{
        f"in {suffix or 'bytes'}": ({"limits": {"memory": f"{number}{suffix}"}}, limit_bytes)
        for suffix, number, limit_bytes in (
            ("", 8 * GIB, 8 * GIB),
            ("m", 8000 * GIB, 8 * GIB),
            ("k", 9_000_000, 9 * 10**9),
            ("Ki", 8 << 20, 8 * GIB),
            ("M", 9_000, 9 * 10**9),
            ("Mi", 8 << 10, 8 * GIB),
            ("G", 9, 9 * 10**9),
            ("Gi", "8.5", 17 * GIB // 2),
            ("T", 1, 10**12),
            ("Ti", 1, 1 << 40),
            ("P", 1, 10**15),
            ("Pi", 1, 1 << 50),
            ("E", 1, 10**18),
            ("Ei", 1, 1 << 60),
        )
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_counts_the_memory_that_the_container_gets(name: str) -> None:
    resources, wanted_bytes = CASES[name]
    found = owner(**resources)
    plan = decided(found)
    assert isinstance(plan, Plan)
    assert plan.memory is not None
    assert plan.memory.usable_bytes == wanted_bytes
    (container,) = pod_template(found, plan, PodDefaults())["spec"]["containers"]
    assert amount(container["resources"]["limits"]["memory"]) == wanted_bytes


@pytest.mark.parametrize("memory", ["0", "100m", "1k"])
def test_what_holds_nothing_is_refused_with_a_limit_that_holds_the_model(memory: str) -> None:
    refused = decided(owner(limits={"memory": memory}))
    assert isinstance(refused, Infeasible)
    assert refused.constraint == "memory"
    (fix,) = (one for one in refused.fixes if one.field.endswith("limits.memory"))
    assert isinstance(decided(owner(limits={"memory": fix.value})), Plan)


@pytest.mark.parametrize("memory", ["1k", "64Mi", "256Mi", "639Mi"])
def test_a_limit_below_the_process_itself_is_refused_by_name_with_a_limit_that_holds_the_model(memory: str) -> None:
    """No shorter request, and no smaller model, would fit."""
    refused = decided(owner(limits={"memory": memory}))
    assert isinstance(refused, Infeasible)
    assert refused.constraint == "memory"
    mebibytes = int(memory.removesuffix("Mi")) if memory.endswith("Mi") else 0
    for words in (f"{mebibytes} MiB of memory (limits.memory)", "the runtime's own process", "takes 640 MiB"):
        assert words in refused.message
    (fix,) = refused.fixes
    assert fix.field == "podTemplate.spec.containers[runtime].resources.limits.memory"
    assert isinstance(decided(owner(limits={"memory": fix.value})), Plan)


def test_a_limit_that_holds_the_process_alone_is_refused_for_its_tokens() -> None:
    refused = decided(owner(limits={"memory": "700Mi"}))
    assert isinstance(refused, Infeasible)
    assert "has room for 0 tokens of KV cache" in refused.message
    assert "process" not in refused.message


def test_memory_beyond_all_numbers_is_a_number_that_a_status_holds() -> None:
    plan = decided(owner(limits={"memory": "999999999999999Ei"}))
    assert isinstance(plan, Plan)
    assert plan.memory is not None
    assert max(plan.memory.as_dict().values()) < 2**63
