"""LLMDeployments of one model in one namespace ask about it once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.facts.shared_inspections import FRESH_SECONDS, SILENT_SECONDS, SharedInspections
from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.kinds import CONFIG_MAP, JOB, LLM_DEPLOYMENT
from millstream_operator.rendering.inspect_job import Subject, inspection_key, sharing_key
from millstream_operator.rendering.inspection_record import is_inspection
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import IMAGE, FakeOperator, answer_of, respec, world
from tests.support.inspected_models import TOKEN, hub
from tests.support.llmdeployments import deployment, manifest

Manifest = dict[str, Any]
IMAGE_SOURCE = {"source": {"image": {"reference": "registry.invalid/org/name:1"}}}
HUB = {"source": {"huggingFace": {"repository": "org/name"}}}
UNAUTHORIZED = json.dumps({"reason": "DownloadUnauthorized", "message": "The hub answered HTTP 401 to org/name."})
ONE, OTHER = OwnerKey("team", "one"), OwnerKey("team", "other")


def two() -> tuple[FakeOperator, list[OwnerKey]]:
    """`demo` and `second` want the same model; the list has whoever is to be looked at again at once."""
    cluster = world(manifest(model=HUB))
    second = manifest(model=HUB)
    second["metadata"] |= {"name": "second", "uid": "uid-of-second"}
    cluster.put(second)
    woken: list[OwnerKey] = []
    return FakeOperator(cluster, later=lambda key, _seconds: woken.append(key)), woken


def records(cluster: FakeCluster) -> list[str]:
    return sorted(r["metadata"]["ownerReferences"][0]["name"] for r in cluster.all(CONFIG_MAP) if is_inspection(r))


async def test_the_second_waits_for_the_answer_of_the_first_and_keeps_it_as_its_own() -> None:
    operator, woken = two()
    await operator.turn("demo")
    await operator.turn("second")
    assert len(operator.cluster.all(JOB)) == 1
    condition = operator.cluster.the(LLM_DEPLOYMENT, "second")["status"]["conditions"][0]
    assert condition["reason"] == "Inspecting"
    assert "for the LLMDeployment demo, too" in condition["message"]
    operator.cluster.run_jobs(answer_of())
    await operator.turn("demo")
    assert OwnerKey("team", "second") in woken
    await operator.turn("second")
    assert records(operator.cluster) == ["demo", "second"]
    await operator.settle()
    assert operator.cluster.all(JOB) == []


async def test_while_others_have_no_pods_yet_whoever_waits_for_another_s_answer_says_nothing() -> None:
    operator, _ = two()
    operator.busy = True
    await operator.turn("demo")
    await operator.turn("second")
    assert operator.status("demo")["conditions"][0]["reason"] == "Inspecting", "it asks"
    assert "conditions" not in operator.status("second")
    assert "for the LLMDeployment demo, too" in str(operator.retries[-1]), "and looks again"
    operator.busy = False
    await operator.turn("second")
    assert operator.status("second")["conditions"][0]["reason"] == "Inspecting"


async def test_where_the_first_is_refused_the_second_asks_by_itself() -> None:
    operator, woken = two()
    await operator.turn("demo")
    await operator.turn("second")
    operator.cluster.run_jobs(UNAUTHORIZED, 1)
    await operator.turn("demo")
    assert OwnerKey("team", "second") in woken
    await operator.turn("second")
    assert {job["metadata"]["ownerReferences"][0]["name"] for job in operator.cluster.all(JOB)} == {"demo", "second"}


def test_waiting_ends_and_answers_expire() -> None:
    now = 0.0
    shared = SharedInspections(lambda _key: None, lambda: now)
    shared.asking("model", ONE)
    assert shared.asked_by("model", OTHER) == ONE
    assert shared.asked_by("model", ONE) is None
    assert shared.asked_by("model", OwnerKey("elsewhere", "other")) is None, "another namespace, another token"
    now = SILENT_SECONDS + 1
    assert shared.asked_by("model", OTHER) is None
    shared.answered("model", ONE, {"version": 1})
    assert shared.answer("model", OTHER) == {"version": 1}
    assert shared.answer("model", ONE) is None, "one that lost its record inspects again"
    now += FRESH_SECONDS + 1
    assert shared.answer("model", OTHER) is None


def test_who_waits_for_one_that_is_gone_is_woken() -> None:
    woken: list[OwnerKey] = []
    shared = SharedInspections(woken.append)
    shared.asking("model", ONE)
    assert shared.asked_by("model", OTHER) == ONE
    shared.forget(ONE)
    assert woken == [OTHER]
    assert shared.asked_by("model", OTHER) is None


def pod_of(**fields: Any) -> Manifest:
    return {"podTemplate": {"spec": fields}}


def env_of(**variables: str) -> Manifest:
    env = [{"name": name, "value": value} for name, value in variables.items()]
    return pod_of(containers=[{"name": "runtime", "env": env}])


def answers(cluster: FakeCluster) -> Manifest:
    """The revision that each LLMDeployment has on record."""
    records = [record for record in cluster.all(CONFIG_MAP) if is_inspection(record)]
    owners = [record["metadata"]["ownerReferences"][0]["name"] for record in records]
    return {name: json.loads(one["data"]["answer.json"])["revision"] for name, one in zip(owners, records, strict=True)}


async def test_the_answer_of_a_hub_that_another_object_chose_is_not_taken() -> None:
    """`demo` asks a hub of its author's; what that answers decides nothing for `second`."""
    operator, _ = two()
    respec(operator.cluster, **env_of(HF_ENDPOINT="https://hub.invalid"))
    await operator.turn("demo")
    operator.cluster.run_jobs(answer_of("f" * 40))
    await operator.turn("demo")
    assert answers(operator.cluster) == {"demo": "f" * 40}
    await operator.turn("second")
    assert answers(operator.cluster) == {"demo": "f" * 40}
    asked = [job["metadata"]["ownerReferences"][0]["name"] for job in operator.cluster.all(JOB)]
    assert asked == ["second"], "it asks by itself"


async def test_whoever_asks_in_another_way_does_not_wait() -> None:
    operator, _ = two()
    respec(operator.cluster, **env_of(HF_ENDPOINT="https://hub.invalid"))
    await operator.turn("demo")
    await operator.turn("second")
    assert {job["metadata"]["ownerReferences"][0]["name"] for job in operator.cluster.all(JOB)} == {"demo", "second"}


@pytest.mark.parametrize(
    ("plain_model", "way"),
    [
        (HUB, env_of(HF_ENDPOINT="https://hub.invalid")),
        (HUB, env_of(HTTPS_PROXY="http://proxy.invalid")),
        (HUB, {"runtime": {"image": "registry.invalid/another:1"}}),
        (HUB, {"model": hub(**TOKEN)}),
        (IMAGE_SOURCE, pod_of(imagePullSecrets=[{"name": "logins"}])),
    ],
    ids=["hub", "proxy", "image", "token", "pull secrets"],
)
def test_each_way_to_a_model_has_its_own_key_of_sharing_and_the_record_has_the_same(
    plain_model: Manifest, way: Manifest
) -> None:
    spec: Manifest = {"model": plain_model} | way
    plain, other = deployment(model=plain_model), deployment(**spec)
    subjects = [Subject(owner.spec.model.source) for owner in (plain, other)]
    images = [(owner.spec.runtime and owner.spec.runtime.image) or IMAGE for owner in (plain, other)]
    keys = [sharing_key(*each) for each in zip((plain, other), subjects, images, strict=True)]
    assert keys[0] != keys[1]
    assert inspection_key(plain, subjects[0]) == inspection_key(other, subjects[1])


def test_what_reaches_no_source_is_shared() -> None:
    """The name, the size of a batch and the replicas say nothing of the model."""
    subject = Subject(deployment(model=HUB).spec.model.source)
    plain = sharing_key(deployment(model=HUB), subject, IMAGE)
    assert plain == sharing_key(deployment("second", model=HUB, engine={"maxNumSeqs": 8}, replicas=3), subject, IMAGE)
    assert plain != sharing_key(deployment(model=HUB), subject, "registry.invalid/another:1")
