"""The operator's own pods: the restricted profile, labels, replicas, probes and metrics."""

from __future__ import annotations

import pytest

from tests.support.helm_chart import (
    CHART,
    IMAGES,
    helm,
    of_kind,
    operator_of,
    pod_specs,
    render,
)


def test_every_pod_meets_the_restricted_profile() -> None:
    specs = list(pod_specs(render()))
    assert len(specs) == 2  # the operator, and the pod of `helm test`
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            for part in ("requests", "limits"):  # a namespace's ResourceQuota refuses a pod that lacks one of them
                assert {*container["resources"][part]} == {"cpu", "memory", "ephemeral-storage"}


def test_two_replicas_are_kept_apart_and_never_all_taken_away() -> None:
    documents = render()
    deployment, labels = operator_of(documents), operator_of(documents)["spec"]["selector"]["matchLabels"]
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["strategy"]["type"] == "RollingUpdate", "the Lease lets old and new run side by side"
    (spread,) = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert spread["labelSelector"]["matchLabels"] == labels
    (budget,) = of_kind(documents, "PodDisruptionBudget")
    assert (budget["spec"]["maxUnavailable"], budget["spec"]["selector"]["matchLabels"]) == (1, labels)
    assert not of_kind(render("operator.replicas=1"), "PodDisruptionBudget"), "it could only hold a drain up"


def test_probes_and_metrics_reach_the_port_that_the_policy_leaves_open() -> None:
    documents = render("networkPolicy.enabled=true")
    (container,) = operator_of(documents)["spec"]["template"]["spec"]["containers"]
    paths = {probe: container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")}
    assert {probe: get["path"] for probe, get in paths.items()} == {
        "startup": "/healthz",
        "readiness": "/readyz",
        "liveness": "/healthz",
    }
    (service,) = of_kind(documents, "Service")
    (port,) = service["spec"]["ports"]
    (policy,) = of_kind(documents, "NetworkPolicy")
    (allowed,) = policy["spec"]["ingress"][0]["ports"]
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {allowed["port"], port["targetPort"], *(get["port"] for get in paths.values())} == {"health"}
    assert named["health"] == port["port"]
    assert service["spec"]["selector"] == operator_of(documents)["spec"]["selector"]["matchLabels"]


def test_a_service_monitor_comes_when_it_is_asked_for_and_selects_the_metrics_service() -> None:
    assert not of_kind(render(), "ServiceMonitor")
    documents = render("serviceMonitor.enabled=true", "serviceMonitor.labels.release=prometheus")
    (monitor,) = of_kind(documents, "ServiceMonitor")
    (service,) = of_kind(documents, "Service")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"] == [{"port": service["spec"]["ports"][0]["name"], "interval": "30s"}]


def test_labels_of_ones_own_stand_next_to_the_charts() -> None:
    documents = render(
        "operator.podLabels.team=search", "operator.podAnnotations.note=x", "serviceMonitor.enabled=true"
    )
    template, selector = operator_of(documents)["spec"]["template"], operator_of(documents)["spec"]["selector"]
    assert selector["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert template["metadata"]["labels"]["team"] == "search"
    assert {"note", "checksum/pod-defaults"} == template["metadata"]["annotations"].keys()


@pytest.mark.parametrize("label", ["app.kubernetes.io/name", "app.kubernetes.io/component", "helm.sh/chart"])
@pytest.mark.parametrize("value", ["operator.podLabels", "serviceMonitor.labels"])
def test_a_label_that_the_chart_sets_cannot_be_set_a_second_time(value: str, label: str) -> None:
    """A key that stands twice: the last one wins, and the Deployment no longer selects its pods."""
    key = label.replace(".", "\\.")
    done = refused(f"{value}.{key}=mine", "serviceMonitor.enabled=true")
    assert f"{value}: {label} is set by the chart" in done


def test_the_annotation_of_the_chart_cannot_be_set_a_second_time() -> None:
    done = refused("operator.podAnnotations.checksum/pod-defaults=x")
    assert "operator.podAnnotations: checksum/pod-defaults is set by the chart" in done


def refused(*values: str) -> str:
    sets = [word for value in (*IMAGES, *values) for word in ("--set", value)]
    done = helm("template", "m", str(CHART), "--kube-version", "1.34.0", *sets)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.parametrize("release", ["123", "1e3", "true"])
def test_a_release_whose_name_is_a_number_in_yaml_has_words_as_labels(release: str) -> None:
    """The API server refuses a label that is a number."""
    rendered = render(release=release)
    (budget,) = of_kind(rendered, "PodDisruptionBudget")
    named = [budget["spec"]["selector"]["matchLabels"], operator_of(rendered)["spec"]["template"]["metadata"]["labels"]]
    named += [one["metadata"]["labels"] for one in rendered if "labels" in one["metadata"]]
    found = [labels["app.kubernetes.io/instance"] for labels in named if "app.kubernetes.io/instance" in labels]
    assert len(found) > 10
    assert set(found) == {release}
