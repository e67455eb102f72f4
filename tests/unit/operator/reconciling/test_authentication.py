"""A model that asks for API keys: what is applied, how the operator's probe gets in, and what the status says."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import yaml

from millstream_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT, LLM_DEPLOYMENT
from millstream_operator.probing.derived_keys import DerivedKeys
from millstream_operator.reconciling.probe import LONGEST_KEYS_SECONDS, SHORTEST_KEYS_SECONDS
from millstream_operator.rendering.probe_key_ring import ProbeKeyRing
from millstream_operator.rendering.surroundings import Surroundings
from tests.support.fake_operator import FakeModel, FakeOperator, respec, served, world
from tests.support.llmdeployments import deployment, manifest

RING = ProbeKeyRing((b"a" * 32,))
AUTH = {"apiKeysSecretRef": {"name": "team-keys", "key": "keys.txt"}}
PATH = "/var/run/secrets/millstream/api-keys/team-keys/keys.txt"
OPTIONS: dict[str, Any] = {"keys": DerivedKeys(lambda: RING), "surroundings": lambda: Surroundings(RING)}


def live_config(operator: FakeOperator) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(operator.cluster.the(CONFIG_MAP, "demo-live")["data"]["live.json"])
    return found


async def test_the_keys_are_mounted_and_the_probe_gets_in_with_a_key_of_its_own() -> None:
    cluster = world(manifest(auth=AUTH))
    model = FakeModel(cluster)
    model.key = RING.key(deployment())
    operator = FakeOperator(cluster, model=model, **OPTIONS)
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    pod = cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "api-keys"]
    assert volume["secret"]["secretName"] == "team-keys"
    assert volume["secret"]["items"] == [{"key": "keys.txt", "path": "team-keys/keys.txt"}]
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "api-keys"]
    assert mount["readOnly"]
    assert mount["mountPath"] + "/team-keys/keys.txt" == PATH
    boots = [one for one in cluster.all(CONFIG_MAP) if one.get("immutable")]
    assert json.loads(boots[0]["data"]["boot.json"])["api_keys_file"] == PATH
    assert live_config(operator)["probe_key_digests"] == [hashlib.sha256(str(model.key).encode()).hexdigest()]
    everything = yaml.safe_dump([*cluster.objects.values(), *cluster.events])
    assert str(model.key) not in everything, "a value stands in no object, status or Event"


async def test_keys_that_come_later_are_a_rollout_and_rotating_the_probes_is_none() -> None:
    operator = await served(**OPTIONS)
    assert "probe_key_digests" not in live_config(operator)
    before = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    respec(operator.cluster, auth=AUTH)
    operator.model.key = RING.key(operator.owner())
    await operator.settle()
    after = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    assert after != before
    rotated = ProbeKeyRing((b"a" * 32, b"b" * 32))
    restarted = FakeOperator(
        operator.cluster,
        model=operator.model,
        keys=DerivedKeys(lambda: rotated),
        surroundings=lambda: Surroundings(rotated),
    )
    await restarted.settle()
    assert len(live_config(restarted)["probe_key_digests"]) == 2
    assert restarted.cluster.the(DEPLOYMENT)["spec"]["template"] == after
    assert restarted.condition("Ready")["status"] == "True"


async def test_a_revision_that_needs_a_key_is_asked_with_one_though_the_spec_has_no_plan() -> None:
    """The spec that takes the keys away cannot be planned: what runs still asks for them."""
    cluster = world(manifest(auth=AUTH))
    model = FakeModel(cluster)
    model.key = RING.key(deployment())
    operator = FakeOperator(cluster, model=model, **OPTIONS)
    await operator.settle()
    respec(cluster, auth=None, speculation={"method": "EAGLE"})
    await operator.settle()
    assert operator.condition("Ready")["reason"] == "UnsupportedByRuntime"
    assert live_config(operator)["probe_key_digests"] != []


async def test_an_exposed_service_without_keys_serves_on_with_a_condition() -> None:
    operator = await served(manifest(service={"type": "NodePort"}))
    found = operator.condition("Unauthenticated")
    assert (found["status"], found["reason"]) == ("True", "ExposedWithoutAuthentication")
    respec(operator.cluster, replicas=2)
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    respec(operator.cluster, auth={"mode": "Disabled"})
    template = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    await operator.settle()
    assert operator.condition("Unauthenticated") == {}
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] == template, "saying so restarts nothing"
    assert operator.cluster.the(LLM_DEPLOYMENT)["spec"]["service"] == {"type": "NodePort"}


async def test_an_api_key_that_cannot_be_used_is_a_condition_that_stays_over_a_restart() -> None:
    """The runtime reads the Secret and the operator may not; the model serves with the other keys."""
    cluster = world(manifest(auth=AUTH))
    model = FakeModel(cluster)
    model.key = RING.key(deployment())
    model.ready = {"api_keys_problem": "line 3: white space inside the key; write one key per line"}
    operator = FakeOperator(cluster, model=model, **OPTIONS)
    await operator.settle()
    found = operator.condition("APIKeysInvalid")
    assert (found["status"], found["reason"]) == ("True", "APIKeysInvalid")
    assert found["message"].startswith(
        "spec.auth.apiKeysSecretRef, key keys.txt of the Secret team-keys: line 3: white"
    )
    assert operator.condition("Ready")["status"] == "True"
    assert operator.condition("Stalled") == {}
    version = cluster.the(LLM_DEPLOYMENT)["metadata"]["resourceVersion"]
    restarted = FakeOperator(cluster, model=model, **OPTIONS)
    await restarted.settle()
    assert restarted.condition("APIKeysInvalid") == found
    assert cluster.the(LLM_DEPLOYMENT)["metadata"]["resourceVersion"] == version, "nothing new was said"
    model.ready = {}
    corrected = FakeOperator(cluster, model=model, **OPTIONS)
    await corrected.settle()
    assert corrected.condition("APIKeysInvalid") == {}


async def test_a_secret_that_is_deleted_is_a_condition_within_a_minute_or_so() -> None:
    """Nothing in the cluster tells the operator, which has no right on Secrets; the pods do."""
    cluster = world(manifest(auth=AUTH))
    model = FakeModel(cluster)
    model.key = RING.key(deployment())
    waits: list[float] = []
    operator = FakeOperator(cluster, model=model, later=lambda _, seconds: waits.append(seconds), **OPTIONS)
    await operator.settle()
    assert operator.condition("APIKeysInvalid") == {}
    assert min(waits) <= LONGEST_KEYS_SECONDS, "the key comes back for that"
    model.questions.clear()
    model.ready = {"api_keys_problem": "the file is gone; the keys that were read before stay valid"}
    operator.seconds += SHORTEST_KEYS_SECONDS - 1
    await operator.turn()
    assert model.questions == []
    operator.seconds += LONGEST_KEYS_SECONDS - SHORTEST_KEYS_SECONDS + 2
    await operator.turn()
    assert [path for path, _ in model.questions] == ["/ready"], "no token is generated for that"
    assert "the file is gone" in operator.condition("APIKeysInvalid")["message"]
    assert operator.condition("Ready")["status"] == "True"
    model.unreachable = "no answer"
    operator.seconds += LONGEST_KEYS_SECONDS
    await operator.turn()
    assert "the file is gone" in operator.condition("APIKeysInvalid")["message"], "silence mends nothing"
    assert operator.condition("Ready")["status"] == "True", "that is what the probe is for"
    model.unreachable, model.ready = "", {}
    operator.seconds += LONGEST_KEYS_SECONDS
    await operator.turn()
    assert operator.condition("APIKeysInvalid") == {}


async def test_a_model_without_keys_is_not_asked_for_them() -> None:
    operator = await served()
    operator.model.questions.clear()
    operator.seconds += LONGEST_KEYS_SECONDS + 1
    await operator.turn()
    assert operator.model.questions == []


@pytest.mark.parametrize("said", [7, ["a"], "two\nlines", "x" * 5000])
async def test_what_a_program_says_of_its_keys_is_bounded(said: object) -> None:
    cluster = world(manifest(auth=AUTH))
    model = FakeModel(cluster)
    model.key, model.ready = RING.key(deployment()), {"api_keys_problem": said}
    operator = FakeOperator(cluster, model=model, **OPTIONS)
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    assert len(operator.condition("APIKeysInvalid").get("message", "")) < 600
