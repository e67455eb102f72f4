"""Alerts and queries: of metrics that the runtime exports, explained on the page, silent about what was asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from millstream_operator.rendering import queries
from millstream_operator.rendering.alerts import Alert, alerts
from millstream_operator.rendering.companions import POD_MONITOR, PROMETHEUS_RULE, CompanionDefaults, monitors
from millstream_operator.rendering.scaled_object import scaled_object
from millstream_runtime.boot import BootLedger
from millstream_runtime.engine.request import EngineStats, PromptPace, SpeculationStats
from millstream_runtime.engine.speculation.skip import Skip
from millstream_runtime.server.operations.metrics import ServerMetrics
from tests.support.llmdeployments import deployment

PAGE = Path(__file__).resolve().parents[4] / "docs" / "monitoring.md"
SELECTOR = 'namespace="team",millstream_dev_deployment="demo"'
FUNCTIONS = {"sum", "max", "by", "pod", "finished_reason", "reason", "and", "or", "vector"}
FUNCTIONS |= {"min_over_time", "deriv", "increase"}


class StillEngine:
    """A stand-in for the engine's loop: it has run one step, and does nothing."""

    on_step: Any = None
    heartbeat_age_seconds = 1.0
    heartbeat_interval_seconds = 30.0
    heartbeat_latency_seconds = 0.1
    restarts_total = 0
    topology = None
    memory = None
    kernels = ()
    kernel_lookups: Mapping[str, int] = MappingProxyType({})

    @property
    def stats(self) -> EngineStats:
        fields = EngineStats.__dataclass_fields__
        numbers: dict[str, Any] = dict.fromkeys(fields, 1)
        numbers["ended_by_preemptions"] = {1: 1}
        numbers["speculation"] = SpeculationStats(1, 1, (1,), {"no_room": 1})
        numbers["prompt_pace"] = PromptPace(1, 1, 1, 1, 1)
        return EngineStats(**numbers)


def exported() -> set[str]:
    """Names of the samples on the runtime's /metrics, as Prometheus stores them."""
    engine: Any = StillEngine()
    page = ServerMetrics("m", BootLedger(), engine).exposition().decode()
    return {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}


def by_name(**spec: Any) -> dict[str, Alert]:
    return {alert.name: alert for alert in alerts(deployment(**spec))}


def metrics_in(expression: str) -> set[str]:
    """Every name of an expression that is neither a function, a label nor in a selector."""
    bare = re.sub(r"\{[^}]*\}(\[\w+\])?", " ", expression)
    return set(re.findall(r"[A-Za-z_:][\w:]*", bare)) - FUNCTIONS


def test_every_query_asks_for_what_the_runtime_exports() -> None:
    known = exported()
    names = {value for name, value in vars(queries).items() if name.isupper() and name != "DEPLOYMENT_METRIC_LABEL"}
    assert names <= known, "a name that is not exported is an alert that never fires"
    for alert in alerts(deployment()):
        found = metrics_in(alert.expression)
        assert found, alert.name
        assert found <= known, alert.name


def test_every_selector_is_of_one_llmdeployment() -> None:
    owner = deployment(autoscaling={"minReplicas": 0, "maxReplicas": 2})
    assert owner.spec.autoscaling is not None
    keda = scaled_object(owner, owner.spec.autoscaling, "http://p:9090")["spec"]["triggers"]
    expressions = [alert.expression for alert in alerts(owner)] + [one["metadata"]["query"] for one in keda]
    for expression in expressions:
        selectors = re.findall(r"\{([^}]*)\}", expression)
        assert selectors, expression
        assert {re.sub(r',reason=~"[a-z_|]+"$', "", one) for one in selectors} == {SELECTOR}, expression
        assert expression.count("(") == expression.count(")"), expression


def test_a_series_that_is_scraped_twice_counts_once() -> None:
    for alert in alerts(deployment()):
        assert not re.search(r"(?<!by )\bsum\((?!max by \(pod)", alert.expression), alert.name


def test_a_model_that_is_switched_off_has_no_availability_alert() -> None:
    assert "MillstreamNoReadyReplica" in by_name(replicas=1)
    assert "MillstreamNoReadyReplica" not in by_name(replicas=0)


def test_a_model_that_no_longer_says_anything_is_not_ready() -> None:
    """`sum` of nothing is nothing, and nothing is not below 1: the alert would be silent when all pods are gone."""
    assert " or vector(0)) == 0" in by_name()["MillstreamNoReadyReplica"].expression


@pytest.mark.parametrize(("timeout", "seconds"), [(None, 1200), ("1h30m", 5400)])
def test_a_warm_up_may_take_what_it_was_given(timeout: str | None, seconds: int) -> None:
    warmup = {"timeout": timeout} if timeout else {}
    assert by_name(warmup=warmup)["MillstreamWarmupStuck"].for_seconds == seconds


@pytest.mark.parametrize(("interval", "oldest"), [(None, 300), ("10m", 3000)])
def test_a_heartbeat_is_late_by_its_own_interval(interval: str | None, oldest: int) -> None:
    warmup = {"heartbeatInterval": interval} if interval else {}
    assert by_name(warmup=warmup)["MillstreamHeartbeatLate"].expression.endswith(f"> {oldest}")


def test_without_heartbeats_an_idle_engine_is_not_late() -> None:
    assert "MillstreamHeartbeatLate" not in by_name(warmup={"heartbeatInterval": "0s"})


def test_speculation_that_is_disabled_has_no_alert() -> None:
    names = {"MillstreamDraftAcceptanceLow", "MillstreamSpeculationOff"}
    assert names <= by_name().keys(), "Auto may choose it"
    assert names <= by_name(speculation={"method": "NGram"}).keys()
    assert not names & by_name(speculation={"method": "Disabled"}).keys()


def test_the_reasons_that_an_alert_selects_are_those_of_the_runtime() -> None:
    (found,) = set(re.findall(r'reason=~"([^"]*)"', by_name()["MillstreamSpeculationOff"].expression))
    assert set(found.split("|")) == {Skip.NO_GAIN, Skip.DRAFTER_FAILED}


def test_the_page_explains_every_alert_and_no_other() -> None:
    text = PAGE.read_text(encoding="utf-8")
    explained = re.findall(r"^### (Millstream\w+)$", text, flags=re.MULTILINE)
    assert explained == list(by_name())
    for alert in alerts(deployment()):
        (rule,) = [alert.as_rule(deployment())]
        assert rule["annotations"]["runbook"] == f"docs/monitoring.md#{alert.name.lower()}", "the heading's anchor"
        assert rule["annotations"]["summary"].startswith("team/demo: ")
        assert ("**Critical.**" in text.split(f"### {alert.name}")[1].split("###")[0]) == (alert.severity == "critical")


# The objects


def test_pods_are_monitored_by_their_selector_and_named_by_their_label() -> None:
    (monitor, rule) = monitors(deployment(), (POD_MONITOR, PROMETHEUS_RULE), CompanionDefaults())
    assert (monitor["kind"], rule["kind"]) == (POD_MONITOR, PROMETHEUS_RULE)
    assert monitor["spec"]["selector"]["matchLabels"] == {
        "millstream.dev/deployment": "demo",
        "millstream.dev/role": "leader",
    }
    assert monitor["spec"]["podMetricsEndpoints"] == [{"port": "http", "path": "/metrics"}]
    (label,) = monitor["spec"]["podTargetLabels"]
    assert re.sub(r"[^a-zA-Z0-9]", "_", label) in SELECTOR, "Prometheus writes it so"


def test_labels_of_the_spec_go_over_the_charts_and_ours_over_both() -> None:
    defaults = CompanionDefaults(monitoring_labels={"release": "a", "team": "x", "app.kubernetes.io/name": "stolen"})
    owner = deployment(monitoring={"labels": {"release": "b"}})
    for one in monitors(owner, (POD_MONITOR, PROMETHEUS_RULE), defaults):
        labels = one["metadata"]["labels"]
        assert (labels["release"], labels["team"]) == ("b", "x")
        assert labels["app.kubernetes.io/name"] == "millstream-runtime"


@pytest.mark.parametrize("served", [(), (POD_MONITOR,), (PROMETHEUS_RULE,)])
def test_only_kinds_that_are_served_are_made(served: tuple[str, ...]) -> None:
    assert tuple(one["kind"] for one in monitors(deployment(), served, CompanionDefaults())) == served
    off = deployment(monitoring={"mode": "Disabled"})
    assert monitors(off, (POD_MONITOR, PROMETHEUS_RULE), CompanionDefaults()) == []
