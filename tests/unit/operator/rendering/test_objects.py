"""The objects around the pod: who owns them, what selects what, and what they let through."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import parse
from millstream_operator.api.status import AppliedStrategy
from millstream_operator.kube.kinds import OWNED
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.rendering.inspect_job import Subject, inspect_job
from millstream_operator.rendering.inspection_record import inspection_record
from millstream_operator.rendering.objects import objects
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import Revision, controller_revision, read_revision, render_revision
from millstream_operator.rendering.revision_marks import Failure, Marks, read_marks
from millstream_operator.rendering.service import service_url
from tests.support.llmdeployments import NAMESPACE, UID, deployment, full_manifest, manifest

DEFAULTS = PlanDefaults("registry.example.com/runtime:1")


def revision(owner: LLMDeployment) -> Revision:
    return render_revision(owner, plan_from_spec(owner, DEFAULTS), PodDefaults())


def rendered(owner: LLMDeployment) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in objects(owner, revision(owner))}


def test_what_a_pod_needs_comes_before_the_deployment_that_makes_pods() -> None:
    kinds = [one["kind"] for one in objects(deployment(replicas=2), revision(deployment(replicas=2)))]
    assert kinds == [
        *("ServiceAccount", "NetworkPolicy", "Service", "PodDisruptionBudget", "ConfigMap", "ConfigMap"),
        "Deployment",
    ]


def test_every_child_is_owned_labelled_and_watched() -> None:
    source = {"huggingFace": {"repository": "org/name"}}
    owner = deployment(replicas=2, model={"source": source, "cache": {"size": "20Gi"}})
    record = inspection_record(owner, "0123456789", {})
    job = inspect_job(owner, Subject(owner.spec.model.source), "runtime:1", PodDefaults())
    everything = [*objects(owner, revision(owner)), controller_revision(owner, revision(owner), 1), record, job]
    assert {one["kind"] for one in everything} == {kind.kind for kind in OWNED}, "what is not watched is not repaired"
    for one in everything:
        metadata = one["metadata"]
        assert metadata["namespace"] == NAMESPACE
        assert metadata["labels"]["millstream.dev/deployment"] == "demo"
        assert metadata["ownerReferences"] == [
            {
                "apiVersion": "millstream.dev/v1alpha1",
                "kind": "LLMDeployment",
                "name": "demo",
                "uid": UID,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]


def test_selectors_stay_the_same_whatever_the_spec_says() -> None:
    """A Deployment's selector cannot change: had it a field of the spec in it, an update would be refused."""
    small, large = rendered(deployment()), rendered(parse(full_manifest()))
    for one in (small, large):
        selector = {"millstream.dev/deployment": "demo", "millstream.dev/role": "leader"}
        assert one["Deployment"]["spec"]["selector"] == {"matchLabels": selector}
        assert one["Service"]["spec"]["selector"] == selector
        assert one["NetworkPolicy"]["spec"]["podSelector"] == {"matchLabels": {"millstream.dev/deployment": "demo"}}
        labels = one["Deployment"]["spec"]["template"]["metadata"]["labels"]
        assert selector.items() <= labels.items()
    assert large["PodDisruptionBudget"]["spec"]["selector"] == small["Deployment"]["spec"]["selector"]


@pytest.mark.parametrize(
    ("asked", "surge", "unavailable"), [("Auto", 1, 0), ("Availability", 1, 0), ("ResourceAware", 0, 1)]
)
def test_one_pod_at_a_time_meets_a_new_revision(asked: str, surge: int, unavailable: int) -> None:
    strategy = rendered(deployment(rollout={"strategy": asked}))["Deployment"]["spec"]["strategy"]
    assert strategy == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
    }


# Configuration


def test_another_configuration_is_another_map_and_the_same_one_is_shared() -> None:
    def boots(*owners: LLMDeployment) -> list[str]:
        last = owners[-1]
        found = objects(last, revision(last), None, [revision(owner) for owner in owners[:-1]])
        return [one["metadata"]["name"] for one in found if one["kind"] == "ConfigMap" and one.get("immutable")]

    before, after = deployment(), deployment(engine={"maxNumSeqs": 8})
    labelled = deployment(podTemplate={"metadata": {"labels": {"team": "a"}}})
    assert len(boots(before, after)) == 2, "that of pods which still run stays"
    assert boots(before, labelled) == boots(before), "another pod, the same configuration"


def test_no_childs_name_can_be_another_llmdeployments() -> None:
    """`demo` and `demo-live` in one namespace, or a name that ends like a hash."""
    names: list[str] = []
    for name in ("demo", "demo-live", "demo-0123456789"):
        owner = parse(manifest(name))
        names += [one["metadata"]["name"] for one in objects(owner, revision(owner)) if one["kind"] == "ConfigMap"]
    assert len(set(names)) == len(names) == 6


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        ({}, 1200 + 600),
        ({"warmup": {"timeout": "1h"}}, 3600 + 600),
        ({"rollout": {"progressDeadline": "45m"}}, 2700),
        ({"rollout": {"progressDeadline": "45m", "drainTimeout": "2h", "strategy": "ResourceAware"}}, 2700 + 7200),
    ],
)
def test_the_progress_deadline_leaves_time_to_warm_up(spec: dict[str, Any], seconds: int) -> None:
    assert rendered(deployment(**spec))["Deployment"]["spec"]["progressDeadlineSeconds"] == seconds


def test_the_service_leads_to_the_runtimes_port_by_its_name() -> None:
    one = rendered(deployment())
    (port,) = one["Service"]["spec"]["ports"]
    (container,) = one["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert port["targetPort"] == container["ports"][0]["name"] == "http"
    assert (port["port"], one["Service"]["spec"]["type"]) == (80, "ClusterIP")


def test_the_url_is_the_services() -> None:
    assert service_url(deployment()) == "http://demo.team.svc"
    assert service_url(deployment(service={"port": 8080})) == "http://demo.team.svc:8080"


def test_the_service_account_gives_no_token_away() -> None:
    account = rendered(deployment())["ServiceAccount"]
    assert account["automountServiceAccountToken"] is False
    assert "secrets" not in account


@pytest.mark.parametrize(("replicas", "there"), [(0, False), (1, False), (2, True), (5, True)])
def test_a_budget_exists_where_it_does_not_block_a_drain(replicas: int, there: bool) -> None:
    assert ("PodDisruptionBudget" in rendered(deployment(replicas=replicas))) == there


# Revisions


def test_a_revision_survives_its_record() -> None:
    owner = parse(full_manifest())
    made = revision(owner)
    assert read_revision(controller_revision(owner, made, 3)) == made


def test_marks_survive_their_record_and_nonsense_counts_as_none() -> None:
    owner = deployment()
    marks = Marks(answered=True, strategy=AppliedStrategy.RESOURCE_AWARE, failure=Failure("OutOfMemory", "Zu groß."))
    assert read_marks(controller_revision(owner, revision(owner), 1, marks)) == marks
    assert read_marks(controller_revision(owner, revision(owner), 1)) == Marks()
    for annotation in ("answered", "rollout-strategy", "failed"):
        record = controller_revision(owner, revision(owner), 1)
        record["metadata"]["annotations"] = {f"millstream.dev/{annotation}": "[nonsense"}
        assert read_marks(record) == Marks()


def test_a_record_of_an_unknown_format_is_not_guessed_at() -> None:
    stored = controller_revision(deployment(), revision(deployment()), 1)
    stored["data"]["format"] = 3
    assert read_revision(stored) is None
    del stored["data"]
    assert read_revision(stored) is None


def test_pods_carry_the_digest_of_their_template_and_no_number() -> None:
    made = revision(deployment())
    assert made.template["metadata"]["labels"]["millstream.dev/revision"] == made.digest
    assert made == revision(deployment()), "the same on every machine, each time"


UNTOUCHED_PODS: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 7},
    "autoscaling": {"autoscaling": {"maxReplicas": 7}},
    "monitoring": {"monitoring": {"mode": "Disabled"}},
    "service": {"service": {"type": "NodePort", "port": 8080}},
    "progressDeadline": {"rollout": {"progressDeadline": "3h"}},
    "strategy": {"rollout": {"strategy": "ResourceAware"}},
    "heartbeats": {"warmup": {"heartbeatInterval": "3s"}},
    "log level": {"runtime": {"logLevel": "Debug"}},
}


@pytest.mark.parametrize("name", UNTOUCHED_PODS)
def test_what_does_not_reach_the_pods_makes_no_revision(name: str) -> None:
    assert revision(deployment(**UNTOUCHED_PODS[name])) == revision(deployment())


def test_what_reaches_the_pods_makes_one() -> None:
    before, after = revision(deployment()), revision(deployment(engine={"maxNumSeqs": 8}))
    assert before.input_hash != after.input_hash
    assert before.digest != after.digest
    assert before.name != after.name
    assert before.config_hash != after.config_hash


def test_the_same_in_other_words_restarts_nothing() -> None:
    """`60s` for `1m` is another spec, hence another record, but the pods stay."""
    minute, seconds = (revision(deployment(warmup={"timeout": text})) for text in ("1m", "60s"))
    assert minute.name != seconds.name
    assert minute.digest == seconds.digest


def test_two_names_never_share_a_record() -> None:
    names = {revision(parse(manifest(name))).name for name in ("a", "b")}
    assert len(names) == 2


def test_names_fit_even_for_the_longest_name() -> None:
    """A pod's name adds a ReplicaSet's hash and five letters, and 63 is the limit of a label."""
    longest = "d" * 52
    assert len(revision(parse(manifest(longest))).name) <= 63
