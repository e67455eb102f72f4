"""Which autoscaler there is, and what it says to whom. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.companions import (
    SCALED_OBJECT,
    Autoscaler,
    CompanionDefaults,
    NoAutoscaler,
    autoscaler,
)
from tests.support.llmdeployments import deployment

PROMETHEUS = CompanionDefaults("http://prometheus:9090")
KEDA = (SCALED_OBJECT,)


def scaled(replicas: int = 1, **scaling: Any) -> LLMDeployment:
    return deployment(replicas=replicas, autoscaling={"maxReplicas": 8} | scaling)


def made(owner: LLMDeployment, served: tuple[str, ...] = (), defaults: CompanionDefaults = PROMETHEUS) -> Autoscaler:
    found = autoscaler(owner, served, defaults)
    assert isinstance(found, Autoscaler), found
    return found


def spec_of(owner: LLMDeployment, served: tuple[str, ...] = ()) -> dict[str, Any]:
    spec: dict[str, Any] = made(owner, served).manifest["spec"]
    return spec


def test_without_a_word_about_it_there_is_none() -> None:
    assert autoscaler(deployment(), KEDA, PROMETHEUS) is None


# provider, minReplicas, is KEDA there, is the URL set -> the kind, or a word of the refusal
CHOICES: list[tuple[str | None, int | None, bool, bool, str]] = [
    (None, None, False, False, "HorizontalPodAutoscaler"),
    (None, None, True, False, "HorizontalPodAutoscaler"),
    (None, None, False, True, "HorizontalPodAutoscaler"),
    (None, None, True, True, "ScaledObject"),
    ("Auto", 2, True, True, "ScaledObject"),
    ("HPA", 2, True, True, "HorizontalPodAutoscaler"),
    ("KEDA", 2, True, True, "ScaledObject"),
    ("KEDA", 2, False, True, "serves no ScaledObject"),
    ("KEDA", 2, True, False, "monitoring.prometheusURL is empty"),
    (None, 0, True, True, "ScaledObject"),
    (None, 0, False, True, "minReplicas 0 needs KEDA"),
    (None, 0, True, False, "minReplicas 0 needs KEDA"),
]


@pytest.mark.parametrize(("provider", "least", "keda", "url", "wanted"), CHOICES)
def test_the_kind_follows_the_spec_and_the_cluster(
    provider: str | None, least: int | None, keda: bool, url: bool, wanted: str
) -> None:
    fields: dict[str, Any] = {"provider": provider, "minReplicas": least}
    owner = scaled(**{name: value for name, value in fields.items() if value is not None})
    found = autoscaler(owner, KEDA if keda else (), PROMETHEUS if url else CompanionDefaults())
    if isinstance(found, NoAutoscaler):
        assert wanted in found.message
        assert "Install it, or" in found.message, "what would do is said, too"
        return
    assert found is not None
    assert found.manifest["kind"] == wanted
    assert bool(found.chosen) == (provider in (None, "Auto")), "a choice by the operator is reported"


@pytest.mark.parametrize("served", [(), KEDA])
def test_the_target_is_the_llmdeployment_and_not_its_deployment(served: tuple[str, ...]) -> None:
    """The operator copies its own replicas down: whoever scaled the Deployment would be undone at once."""
    target = spec_of(scaled(), served)["scaleTargetRef"]
    assert target == {"apiVersion": "millstream.dev/v1alpha1", "kind": "LLMDeployment", "name": "demo"}


def test_a_horizontal_pod_autoscaler_reads_the_pods_by_the_runtimes_names() -> None:
    spec = spec_of(scaled(minReplicas=2))
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 8)
    assert [(one["pods"]["metric"]["name"], one["pods"]["target"]["averageValue"]) for one in spec["metrics"]] == [
        ("vllm:num_requests_waiting", "4"),
        ("vllm:kv_cache_usage_perc", "800m"),
    ]


@pytest.mark.parametrize(("percent", "share"), [(1, "10m"), (80, "800m"), (100, "1")])
def test_a_percentage_becomes_the_share_that_the_metric_is(percent: int, share: str) -> None:
    """The metric is called a percentage and is none; the server would store 1000m as 1 and we would see a change."""
    (metric,) = spec_of(scaled(metrics=[{"type": "KVCacheUsage", "target": percent}]))["metrics"]
    assert metric["pods"]["target"]["averageValue"] == share


@pytest.mark.parametrize(
    ("stabilization", "window", "period"), [("0s", 0, 60), ("5m", 300, 300), ("1h", 3600, 1800), (None, 300, 300)]
)
def test_replicas_leave_one_at_a_time(stabilization: str | None, window: int, period: int) -> None:
    """An empty queue asks for none at all; eight busy replicas must not become one."""
    fields: dict[str, Any] = {"scaleDownStabilization": stabilization} if stabilization else {}
    policy = {"type": "Pods", "value": 1, "periodSeconds": period}
    wanted = {"stabilizationWindowSeconds": window, "selectPolicy": "Max", "policies": [policy]}
    assert spec_of(scaled(**fields))["behavior"]["scaleDown"] == wanted
    keda = spec_of(scaled(**fields), KEDA)
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"] == wanted


def triggers(owner: LLMDeployment) -> list[dict[str, str]]:
    spec = spec_of(owner, KEDA)
    assert {one["type"] for one in spec["triggers"]} == {"prometheus"}
    return [one["metadata"] for one in spec["triggers"]]


def test_keda_sums_over_the_pods_each_counted_once() -> None:
    """It wants query / threshold replicas. A pod that is scraped twice must not count twice."""
    waiting, usage = triggers(scaled(minReplicas=1))
    assert waiting["query"] == (
        'sum(max by (pod) (vllm:num_requests_waiting{namespace="team",millstream_dev_deployment="demo"}))'
    )
    assert usage["query"].startswith("100 * sum(max by (pod) (vllm:kv_cache_usage_perc{")
    assert (waiting["threshold"], usage["threshold"]) == ("4", "80")
    assert {waiting["serverAddress"], usage["serverAddress"]} == {"http://prometheus:9090"}


@pytest.mark.parametrize(("replicas", "empty_is_zero"), [(0, "true"), (1, "false"), (3, "false")])
def test_who_is_blind_does_not_shrink_a_model_that_runs(replicas: int, empty_is_zero: str) -> None:
    """No answer is an error while pods run; at none it is 0, or KEDA would not go up to its own minimum."""
    assert {one["ignoreNullValues"] for one in triggers(scaled(replicas=replicas))} == {empty_is_zero}


def test_only_a_model_without_any_traffic_goes_to_zero() -> None:
    """A queue is empty most of the time: by it alone a busy model would be stopped."""
    assert len(triggers(scaled(minReplicas=1))) == 2
    *_, activity = triggers(scaled(minReplicas=0, scaleDownStabilization="10m"))
    for metric in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:request_success_total"):
        assert metric in activity["query"]
    assert "[600s]" in activity["query"], "as long as it may be idle"
    assert int(activity["threshold"]) > 1_000_000, "it keeps one replica and asks for no second"
    assert spec_of(scaled(minReplicas=0), KEDA)["minReplicaCount"] == 0
