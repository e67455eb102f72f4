"""A pod that has less KV cache than its plan promised is named, with both figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millstream_operator.diagnosis.conditions import find
from millstream_operator.planning.measurement import PodMeasurement
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.probing.answer import Answer
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import render_revision
from millstream_operator.status.kept_plan import below_plan
from millstream_operator.status.memory_report import memory_status
from millstream_operator.status.observation import Observation
from millstream_operator.status.status import status_of
from tests.support.llmdeployments import deployment

OWNER = deployment(accelerator={"type": "CPU"})
REVISION = render_revision(OWNER, plan_from_spec(OWNER, PlanDefaults("registry.example.com/r:1")), PodDefaults())
PLANNED_BYTES = 1_000_000_000
LEDGER = {"memory": {"kvCacheBytes": PLANNED_BYTES, "weightsBytes": 1}}


def seen(measured: dict[str, int] | None, engine: dict[str, Any] | None = None, **plan: Any) -> Observation:
    known = dict(REVISION.plan) | LEDGER | plan
    known["engine"] = known["engine"] | (engine or {})
    answer = Answer(measured=PodMeasurement("demo-0", 0, measured)) if measured is not None else Answer()
    return Observation(OWNER, replace(REVISION, plan=known), None, answer=answer)


@pytest.mark.parametrize(
    ("measured", "is_named"),
    [
        ({"kvCacheBytes": 900_000_000, "kvCacheTokens": 90_000}, False),
        ({"kvCacheBytes": 899_999_999, "kvCacheTokens": 89_999}, True),
        ({"kvCacheBytes": 2_000_000_000, "kvCacheTokens": 200_000}, False),
        ({"kvCacheBytes": 600_000_000, "draftKvCacheBytes": 300_000_000, "kvCacheTokens": 60_000}, False),
        ({"kvCacheBytes": 600_000_000, "draftKvCacheBytes": 299_999_999, "kvCacheTokens": 60_000}, True),
        ({"weightsBytes": 5}, False),
        ({}, False),
        (None, False),
    ],
)
def test_a_tenth_less_than_planned_is_named(measured: dict[str, int] | None, is_named: bool) -> None:
    assert (below_plan(seen(measured)) is not None) == is_named


def test_the_message_has_both_figures_and_what_helps() -> None:
    """128 tokens of 10,240 bytes."""
    condition = below_plan(seen({"kvCacheBytes": 1_310_720, "kvCacheTokens": 128}))
    assert condition is not None
    for words in ("is 1.3 MB, for 128 tokens", "promised 1,000.0 MB", "limits.memory", "engine.maxNumBatchedTokens"):
        assert words in condition.message
    on_gpu = below_plan(seen({"kvCacheBytes": 1_310_720, "kvCacheTokens": 128}, accelerator="A100-80GB"))
    assert on_gpu is not None
    assert "Another process may use the GPU" in on_gpu.message


def test_a_pool_that_holds_every_request_at_once_is_as_large_as_it_gets() -> None:
    """The runtime makes none larger: 64 requests of 100 tokens."""
    engine = {"maxModelLen": 100, "maxNumSeqs": 64}
    assert below_plan(seen({"kvCacheBytes": 1_000_000, "kvCacheTokens": 6_400}, engine)) is None
    assert below_plan(seen({"kvCacheBytes": 1_000_000, "kvCacheTokens": 6_399}, engine)) is not None


def test_a_plan_without_a_ledger_promised_nothing() -> None:
    assert below_plan(seen({"kvCacheBytes": 1, "kvCacheTokens": 1}, memory=None)) is None


def test_the_status_has_the_condition_and_the_draft_and_keeps_both() -> None:
    """Also after the operator has restarted, when no pod is asked again."""
    low = {"kvCacheBytes": 100_000_000, "draftKvCacheBytes": 50_000_000, "kvCacheTokens": 10_000}
    first = seen(low)
    status = status_of(first, "2025-01-01T00:00:00Z")
    condition = find(status["conditions"], "BelowPlan")
    assert (condition["status"], condition["reason"]) == ("True", "KVCacheBelowPlan")
    assert (memory_status(first) or {})["measured"] == low
    rollout = {"updateRevision": first.revision.name}
    again = replace(first, answer=Answer(), previous=status | {"rollout": rollout})
    assert below_plan(again) == below_plan(first)
