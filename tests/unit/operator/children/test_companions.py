"""Companions of a model: made, repaired and removed as the cluster's kinds come and go; never at its expense."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.children.children import Children
from millstream_operator.children.companions import CompanionApplier, CompanionInput
from millstream_operator.diagnosis.conditions import find
from millstream_operator.kube.client import ApiError
from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.kinds import (
    CONTROLLER_REVISION,
    HORIZONTAL_POD_AUTOSCALER,
    LLM_DEPLOYMENT,
    OPTIONAL,
    POD_MONITOR,
    PROMETHEUS_RULE,
    SCALED_OBJECT,
    Kind,
)
from millstream_operator.rendering.companions import CompanionDefaults
from millstream_operator.rendering.revision import read_revision
from millstream_operator.status.observation import Observation
from millstream_operator.status.status import status_of
from tests.support.fake_cluster import FakeCluster, Fault
from tests.support.fake_operator import FakeOperator, respec, served, world
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
PROMETHEUS = CompanionDefaults("http://prometheus:9090")
SCALED: dict[str, Any] = {"autoscaling": {"maxReplicas": 4}}


async def running(*installed: Kind, **spec: Any) -> FakeOperator:
    cluster = world(manifest(**spec))
    cluster.installed |= set(installed)
    operator = FakeOperator(cluster, companions=PROMETHEUS)
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    operator.client.requests.clear()
    return operator


def there(cluster: FakeCluster) -> set[str]:
    kinds = (HORIZONTAL_POD_AUTOSCALER, *OPTIONAL)
    return {kind.kind for kind in kinds for _ in cluster.all(kind)}


def said(operator: FakeOperator, condition: str) -> tuple[str, str]:
    found = operator.condition(condition)
    return found.get("status", ""), found.get("reason", "")


async def test_a_spec_without_it_in_a_bare_cluster_has_no_companions() -> None:
    operator = await running()
    assert there(operator.cluster) == set()
    assert said(operator, "Autoscaled") == said(operator, "Monitored") == ("", "")


async def test_everything_is_made_once_and_then_left_alone() -> None:
    operator = await running(*OPTIONAL, **SCALED)
    assert there(operator.cluster) == {"ScaledObject", "PodMonitor", "PrometheusRule"}
    for kind in OPTIONAL:
        (owner,) = operator.cluster.the(kind)["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["controller"]) == ("LLMDeployment", True)
    await operator.turn()
    assert operator.client.requests == [], "neither written nor read in a steady state"


async def test_the_replicas_that_an_autoscaler_set_are_copied_down_and_never_written() -> None:
    operator = await running(**SCALED)
    operator.cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["spec"].update(replicas=3))
    await operator.settle()
    assert operator.cluster.the(LLM_DEPLOYMENT)["spec"]["replicas"] == 3
    assert len([one for one in operator.cluster.objects if one[0] == "Pod"]) == 3
    assert ("apply", "LLMDeployment") not in operator.writes


async def test_keda_that_appears_takes_over_and_hands_back_when_it_goes() -> None:
    operator = await running(**SCALED)
    assert there(operator.cluster) == {"HorizontalPodAutoscaler"}
    operator.cluster.installed.add(SCALED_OBJECT)
    await operator.settle()
    assert there(operator.cluster) == {"ScaledObject"}
    writes = [one for one in operator.writes if one[1] != "LLMDeployment/status"]
    assert writes == [("delete", "HorizontalPodAutoscaler"), ("apply", "ScaledObject")], "never two at one number"
    operator.cluster.uninstall(SCALED_OBJECT)
    for _ in range(3):
        await operator.settle()
    assert there(operator.cluster) == {"HorizontalPodAutoscaler"}
    assert said(operator, "Ready") == ("True", "Ready")
    decisions = operator.cluster.the(LLM_DEPLOYMENT)["status"]["decisions"]
    messages = [one["message"].partition(":")[0] for one in decisions if one["type"] == "AutoscalerChosen"]
    assert messages == ["HorizontalPodAutoscaler", "KEDA", "HorizontalPodAutoscaler"]


async def test_monitors_come_with_their_kinds_and_their_loss_is_reported() -> None:
    operator = await running(monitoring={"mode": "Auto"})
    assert said(operator, "Monitored") == ("False", "MonitoringUnavailable")
    operator.cluster.installed |= {POD_MONITOR, PROMETHEUS_RULE}
    await operator.settle()
    assert there(operator.cluster) == {"PodMonitor", "PrometheusRule"}
    assert said(operator, "Monitored") == ("True", "Monitored")
    operator.cluster.uninstall(PROMETHEUS_RULE)
    for _ in range(3):
        await operator.settle()
    assert said(operator, "Monitored") == ("True", "Monitored")
    assert "serves no PrometheusRule" in operator.condition("Monitored")["message"]
    operator.cluster.uninstall(POD_MONITOR)
    for _ in range(3):
        await operator.settle()
    assert said(operator, "Monitored") == ("False", "MonitoringUnavailable")
    assert said(operator, "Ready") == ("True", "Ready"), "it serves"


async def test_missing_monitors_that_were_not_asked_for_are_reported_only_if_they_existed() -> None:
    operator = await running(POD_MONITOR)
    assert said(operator, "Monitored") == ("True", "Monitored")
    operator.cluster.uninstall(POD_MONITOR)
    for _ in range(3):
        await operator.settle()
    assert said(operator, "Monitored") == ("False", "MonitoringUnavailable")


async def test_what_an_earlier_spec_asked_in_vain_is_forgotten_with_it() -> None:
    operator = await running(monitoring={"mode": "Auto"})
    assert said(operator, "Monitored") == ("False", "MonitoringUnavailable")
    operator.cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["spec"].pop("monitoring"))
    await operator.settle()
    assert said(operator, "Monitored") == ("", ""), "as if it had never been asked"


async def test_between_the_kind_and_the_next_look_nothing_fails() -> None:
    """The CRD is gone, and the operator does not know it yet."""
    operator = await running(*OPTIONAL, **SCALED)
    for kind in OPTIONAL:
        operator.cluster.uninstall(kind)
    respec(
        operator.cluster, warmup={"timeout": "5m"}, monitoring={"labels": {"a": "b"}}, autoscaling={"maxReplicas": 9}
    )
    await operator.turn()
    assert said(operator, "Monitored") == ("False", "MonitoringUnavailable")
    assert said(operator, "Autoscaled") == ("False", "AutoscalerUnavailable")
    await operator.settle()
    assert said(operator, "Ready") == ("True", "Ready")
    assert there(operator.cluster) == {"HorizontalPodAutoscaler"}


async def test_what_is_no_longer_wanted_goes() -> None:
    operator = await running(*OPTIONAL, **SCALED)
    respec(operator.cluster, autoscaling=None, monitoring={"mode": "Disabled"})
    await operator.settle()
    assert there(operator.cluster) == set()
    assert said(operator, "Autoscaled") == said(operator, "Monitored") == ("", "")


@pytest.mark.parametrize("kind", [HORIZONTAL_POD_AUTOSCALER, *OPTIONAL], ids=lambda kind: kind.kind)
async def test_an_edit_and_a_deletion_are_repaired(kind: Kind) -> None:
    provider = "HPA" if kind is HORIZONTAL_POD_AUTOSCALER else "Auto"
    operator = await running(*OPTIONAL, autoscaling={"maxReplicas": 4, "provider": provider})
    wanted = operator.cluster.the(kind)["spec"]
    operator.cluster.edit(kind, "demo", lambda live: live.update(spec=dict.fromkeys(live["spec"])))
    await operator.settle()
    assert operator.cluster.the(kind)["spec"] == wanted
    operator.cluster.remove(kind, "demo")
    await operator.settle()
    assert operator.cluster.the(kind)["spec"] == wanted


CONFLICTS = {HORIZONTAL_POD_AUTOSCALER: "Autoscaled", POD_MONITOR: "Monitored", PROMETHEUS_RULE: "Monitored"}


@pytest.mark.parametrize("kind", CONFLICTS, ids=lambda kind: kind.kind)
async def test_somebody_elses_object_is_left_alone_and_the_model_serves(kind: Kind) -> None:
    """A team's own HPA, named like its deployment, is the usual one."""
    foreign = {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {"name": "demo", "namespace": "team"},
        "spec": {"theirs": True},
    }
    cluster = world(manifest(autoscaling={"maxReplicas": 4, "provider": "HPA"}))
    cluster.installed |= {POD_MONITOR, PROMETHEUS_RULE}
    cluster.put(foreign)
    operator = FakeOperator(cluster)
    for _ in range(3):
        await operator.turn()
        cluster.roll_out()
    before = cluster.the(kind)
    await operator.turn()
    assert cluster.the(kind) == before
    assert before["spec"] == {"theirs": True}
    assert said(operator, CONFLICTS[kind]) == ("False", "NameConflict")
    assert said(operator, "NameConflict") == ("True", "NameConflict")
    assert said(operator, "Ready") == ("True", "Ready"), "it serves"
    assert operator.retries[-1].at_least_seconds == 30.0, "it is looked at again"
    cluster.remove(kind, "demo")
    await operator.settle()
    assert operator.condition("NameConflict") == {}
    assert "theirs" not in cluster.the(kind)["spec"]


async def test_a_webhook_that_is_down_keeps_no_status_back() -> None:
    """500 for ever: without a word about it the model would never be Ready."""
    cluster = world(manifest())
    cluster.installed.add(PROMETHEUS_RULE)
    operator = FakeOperator(cluster)
    apply = operator.client.apply

    async def refused(rendered: Manifest, subresource: str | None = None) -> Manifest:
        if rendered["kind"] == "PrometheusRule":
            raise ApiError(500, "InternalError", "failed calling webhook prometheusrulemutate")
        return await apply(rendered, subresource)

    operator.client.apply = refused  # type: ignore[method-assign, assignment]
    for _ in range(4):
        await operator.turn()
        cluster.roll_out()
    assert said(operator, "Ready") == ("True", "Ready")
    assert said(operator, "Monitored") == ("False", "ApplyRefused")
    assert "prometheusrulemutate" in operator.condition("Monitored")["message"]


async def test_a_wish_that_cannot_be_had_leaves_the_autoscaler_that_is_there() -> None:
    operator = await running(**SCALED)
    respec(operator.cluster, autoscaling={"minReplicas": 0, "maxReplicas": 4})
    await operator.settle()
    assert said(operator, "Autoscaled") == ("False", "AutoscalerUnavailable")
    assert "needs KEDA" in operator.condition("Autoscaled")["message"]
    assert operator.cluster.the(HORIZONTAL_POD_AUTOSCALER)["spec"]["minReplicas"] == 1
    assert said(operator, "Ready") == ("True", "Ready")


async def test_a_spec_that_is_refused_still_has_its_autoscaler() -> None:
    """The last good state serves on, and what no plan decides follows the spec."""
    operator = await running(*OPTIONAL, **SCALED)
    respec(operator.cluster, speculation={"method": "EAGLE"}, autoscaling={"maxReplicas": 7})
    await operator.settle()
    assert said(operator, "Ready")[0] == "False"
    assert operator.cluster.the(SCALED_OBJECT)["spec"]["maxReplicaCount"] == 7
    assert said(operator, "Autoscaled")[1] == "AutoscalerStarting"
    assert said(operator, "Monitored") == ("True", "Monitored")


async def test_a_turn_that_ends_early_takes_no_word_back() -> None:
    """A decision is reported before it is applied, when the autoscaler was not read yet: its condition stays."""
    operator = await running(*OPTIONAL, **SCALED)
    previous = operator.cluster.the(LLM_DEPLOYMENT)["status"]
    (record,) = operator.cluster.all(CONTROLLER_REVISION)
    revision = read_revision(record)
    assert revision is not None
    status = status_of(Observation(operator.owner(), revision, None, previous=previous), "2030-01-01T00:00:00Z")
    kinds = ("Autoscaled", "Monitored")
    assert [find(status["conditions"], one) for one in kinds] == [operator.condition(one) for one in kinds]


@pytest.mark.parametrize(
    ("replicas", "least", "bound"),
    [(1, 1, 3), (3, 3, 3), (5, 1, 5), (1, 4, None)],
    ids=["the budget's", "minReplicas is paid for", "none is stopped for a budget", "minReplicas is not paid for"],
)
async def test_an_enforced_budget_bounds_the_autoscaler(replicas: int, least: int, bound: int | None) -> None:
    """The pinned plan knows a price: two replicas cost $2,000 a month."""
    operator = await running(**SCALED)
    scaling = {"minReplicas": least, "maxReplicas": 9}
    spec = {"accelerator": None, "budget": {"maxMonthlyUSD": 3000}, "autoscaling": scaling, "replicas": replicas}
    respec(operator.cluster, **spec)
    plan = {"replicas": 2, "cost": {"hourlyMilliUSD": 2740, "monthlyUSD": 2000}}
    operator.index.put(LLM_DEPLOYMENT, operator.cluster.the(LLM_DEPLOYMENT))
    children = Children(operator.client, operator.index)
    companions = CompanionApplier(children, operator.optional, PROMETHEUS)
    found = await companions.apply_all(CompanionInput(operator.owner(), OwnerKey("team", "demo"), plan))
    (autoscaled,) = found.conditions
    live = operator.cluster.the(HORIZONTAL_POD_AUTOSCALER)["spec"]
    assert live["maxReplicas"] == (bound or 4), "the one that is there stays where no bound helps"
    assert (autoscaled.reason == "BudgetExceeded") == (bound is None)
    if bound is None:
        assert "set minReplicas and maxReplicas to 3 or less" in autoscaled.message


# What its controller says


def hpa_says(operator: FakeOperator, *conditions: tuple[str, str, str, str]) -> None:
    reported = [{"type": t, "status": s, "reason": r, "message": m} for t, s, r, m in conditions]
    operator.cluster.set_status(HORIZONTAL_POD_AUTOSCALER, "demo", {"conditions": reported})


ABLE = ("AbleToScale", "True", "SucceededGetScale", "")
NO_ADAPTER = "unable to fetch metrics from custom metrics API: no custom metrics API registered"
SAID_BY_AN_HPA: dict[str, tuple[list[tuple[str, str, str, str]], tuple[str, str], str]] = {
    "nothing yet": ([], ("Unknown", "AutoscalerStarting"), "no conditions yet"),
    "it works": ([ABLE, ("ScalingActive", "True", "ValidMetricFound", "")], ("True", "Autoscaling"), "1 to 4 replicas"),
    "no adapter": (
        [ABLE, ("ScalingActive", "False", "FailedGetPodsMetric", NO_ADAPTER)],
        ("False", "MetricsUnavailable"),
        NO_ADAPTER,
    ),
    "no scale": (
        [("AbleToScale", "False", "FailedGetScale", "no rights on scale")],
        ("False", "AutoscalerFailing"),
        "no rights on scale",
    ),
}


@pytest.mark.parametrize("name", SAID_BY_AN_HPA)
async def test_the_conditions_of_an_hpa_reach_the_status(name: str) -> None:
    conditions, wanted, words = SAID_BY_AN_HPA[name]
    operator = await running(**SCALED)
    hpa_says(operator, *conditions)
    await operator.settle()
    assert said(operator, "Autoscaled") == wanted
    assert words in operator.condition("Autoscaled")["message"]


async def test_varying_readings_wake_no_reconcile() -> None:
    """An HPA's status changes with each of its looks; a thousand of them would keep the operator busy for nothing."""
    operator = await running(**SCALED)
    hpa_says(operator, ABLE, ("ScalingActive", "True", "ValidMetricFound", ""))
    await operator.settle()
    live = operator.cluster.the(HORIZONTAL_POD_AUTOSCALER)
    live["status"] |= {"currentReplicas": 3, "currentMetrics": [{"pods": {"current": {"averageValue": "3"}}}]}
    operator.cluster.set_status(HORIZONTAL_POD_AUTOSCALER, "demo", live["status"])
    varied = operator.cluster.the(HORIZONTAL_POD_AUTOSCALER)
    assert not operator.index.put(HORIZONTAL_POD_AUTOSCALER, varied), "kept, and nothing to look at"
    kept = operator.index.get(HORIZONTAL_POD_AUTOSCALER, "team", "demo") or {}
    assert kept["metadata"]["resourceVersion"] == varied["metadata"]["resourceVersion"]
    hpa_says(operator, ABLE, ("ScalingActive", "False", "FailedGetPodsMetric", ""))
    assert operator.index.put(HORIZONTAL_POD_AUTOSCALER, operator.cluster.the(HORIZONTAL_POD_AUTOSCALER)), "news"


async def test_zero_replicas_switch_a_horizontal_pod_autoscaler_off_and_that_is_said() -> None:
    operator = await running(**SCALED)
    respec(operator.cluster, replicas=0)
    await operator.settle()
    assert said(operator, "Autoscaled") == ("False", "ScaledToZero")


KEDA_READY = {"type": "Ready", "status": "True"}
SAID_BY_KEDA: dict[str, tuple[int, list[Manifest], tuple[str, str]]] = {
    "nothing yet": (1, [], ("Unknown", "AutoscalerStarting")),
    "it works": (1, [KEDA_READY], ("True", "Autoscaling")),
    "idle": (0, [KEDA_READY], ("True", "Autoscaling")),
    "blind": (1, [{"type": "Ready", "status": "False", "message": "triggers"}], ("False", "AutoscalerFailing")),
    "its HPA is blind": (1, [KEDA_READY, {"type": "HPAActive", "status": "False"}], ("False", "MetricsUnavailable")),
}


@pytest.mark.parametrize("name", SAID_BY_KEDA)
async def test_the_conditions_of_a_scaled_object_reach_the_status(name: str) -> None:
    replicas, reported, wanted = SAID_BY_KEDA[name]
    operator = await running(SCALED_OBJECT, autoscaling={"minReplicas": 0, "maxReplicas": 4})
    respec(operator.cluster, replicas=replicas)
    await operator.settle()
    operator.cluster.set_status(SCALED_OBJECT, "demo", {"conditions": reported})
    await operator.settle()
    assert said(operator, "Autoscaled") == wanted


async def test_kedas_own_autoscaler_is_not_ours_to_prune() -> None:
    """KEDA copies our labels to the HorizontalPodAutoscaler that it makes."""
    operator = await running(SCALED_OBJECT, **SCALED)
    scaled = operator.cluster.the(SCALED_OBJECT)["metadata"]
    theirs = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {
            "name": "keda-hpa-demo",
            "namespace": "team",
            "labels": scaled["labels"],
            "ownerReferences": [
                {"kind": "ScaledObject", "name": "demo", "uid": scaled["uid"], "controller": True},
            ],
        },
        "spec": {"maxReplicas": 4},
    }
    operator.cluster.put(theirs)
    await operator.settle()
    assert operator.cluster.get(HORIZONTAL_POD_AUTOSCALER, "keda-hpa-demo") is not None


# Faults


async def test_a_refusal_by_conflict_is_tried_again_from_fresh_state() -> None:
    operator = FakeOperator(world(manifest(**SCALED)), fault=Fault(6, ApiError(409, "Conflict", "modified")))
    await operator.settle()
    assert there(operator.cluster) == {"HorizontalPodAutoscaler"}


async def test_served_without_optional_kinds_is_as_before() -> None:
    operator = await served()
    await operator.turn()
    assert operator.client.requests == []
