"""An object that the API server refuses: what serves is scaled, asked and reported; a new pod template waits for it."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.client import ApiError
from millstream_operator.kube.kinds import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    POD_MONITOR,
    PROMETHEUS_RULE,
)
from millstream_operator.rendering.config_maps import mounted_maps
from millstream_operator.rollout.pruning import HISTORY_LIMIT
from tests.support.fake_operator import FakeOperator, respec, served, world
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
FIELD = "spec.ingress[0].from[0].ipBlock.except[0]"
INVALID = ApiError(
    422,
    "Invalid",
    f'NetworkPolicy.networking.k8s.io "demo" is invalid: {FIELD}: Invalid value: "10.0.0.0/8": must be a subnet',
)
FORBIDDEN = ApiError(403, "Forbidden", 'networkpolicies.networking.k8s.io "demo" is forbidden: no')
BUDGET_REFUSED = ApiError(403, "Forbidden", 'poddisruptionbudgets.policy "demo" is forbidden: no')
PEERS: Manifest = {"network": {"ingress": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}}


async def some_turns(operator: FakeOperator) -> None:
    """Until all else has settled: what is refused is tried again and again."""
    for _ in range(8):
        await operator.turn()
        operator.cluster.roll_out()


def replicas(operator: FakeOperator) -> int:
    found: int = operator.cluster.the(DEPLOYMENT)["spec"]["replicas"]
    return found


def image(operator: FakeOperator) -> str:
    found: str = operator.cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]["containers"][0]["image"]
    return found


@pytest.mark.parametrize(("error", "reason"), [(INVALID, "ApplyRefused"), (FORBIDDEN, "AdmissionDenied")])
async def test_what_serves_is_scaled_and_asked_while_its_policy_is_refused(error: ApiError, reason: str) -> None:
    operator = await served()
    operator.cluster.refusing["NetworkPolicy"] = error
    respec(operator.cluster, replicas=3, **PEERS)
    await some_turns(operator)
    assert replicas(operator) == 3
    assert operator.status()["availableReplicas"] == 3
    ready = operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", reason)
    assert "NetworkPolicy demo" in ready["message"]
    assert error.message in ready["message"]
    assert ready["message"].endswith("The pods do not wait for it.")
    assert operator.condition("ModelReady")["status"] == "True"
    assert operator.condition("Available")["status"] == "True"
    assert operator.condition("Stalled")["reason"] == reason
    respec(operator.cluster, replicas=1)
    await some_turns(operator)
    assert replicas(operator) == 1
    operator.cluster.refusing.clear()
    await some_turns(operator)
    assert operator.condition("Ready")["status"] == "True"


async def test_a_new_pod_template_waits_for_its_policy_while_what_serves_is_scaled() -> None:
    operator = await served(manifest(runtime={"image": "good"}))
    operator.cluster.refusing["NetworkPolicy"] = INVALID
    respec(operator.cluster, replicas=2, runtime={"image": "better"}, **PEERS)
    await some_turns(operator)
    assert (image(operator), replicas(operator)) == ("good", 2)
    ready = operator.condition("Ready")
    assert (ready["reason"], FIELD in ready["message"]) == ("ApplyRefused", True)
    assert "The pods that run stay and follow spec.replicas; revision demo-" in ready["message"]
    assert operator.condition("Available")["status"] == "True"
    operator.cluster.refusing.clear()
    await some_turns(operator)
    assert (image(operator), replicas(operator)) == ("better", 2)
    assert operator.condition("Ready")["status"] == "True"


async def test_no_first_pod_starts_without_its_policy() -> None:
    cluster = world()
    cluster.refusing["NetworkPolicy"] = INVALID
    operator = FakeOperator(cluster)
    await some_turns(operator)
    assert cluster.get(DEPLOYMENT, "demo") is None
    assert operator.condition("Ready")["message"].endswith("No pod is made before.")
    cluster.refusing.clear()
    await some_turns(operator)
    assert operator.condition("Ready")["status"] == "True"


def deny(patch: pytest.MonkeyPatch, operator: FakeOperator, forbidden: str, most: int = 100) -> None:
    """An admission webhook of Deployments: it denies one image, and more replicas than `most`."""
    store = operator.cluster._store

    def admitted(key: tuple[str, str, str], stored: Manifest) -> Manifest:
        if key[0] == "Deployment" and (
            stored["spec"]["template"]["spec"]["containers"][0]["image"] == forbidden
            or stored["spec"]["replicas"] > most
        ):
            raise ApiError(403, "Forbidden", 'admission webhook "images.example.com" denied the request: no')
        return store(key, stored)

    patch.setattr(operator.cluster, "_store", admitted)


async def test_what_serves_is_scaled_while_the_new_template_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator = await served(manifest(runtime={"image": "good"}))
    deny(monkeypatch, operator, "denied")
    respec(operator.cluster, replicas=3, runtime={"image": "denied"})
    await some_turns(operator)
    assert (image(operator), replicas(operator)) == ("good", 3)
    ready = operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "AdmissionDenied")
    assert "The pods that run stay and follow spec.replicas" in ready["message"]
    respec(operator.cluster, replicas=2, runtime={"image": "good"})
    await some_turns(operator)
    assert (image(operator), replicas(operator)) == ("good", 2)
    assert operator.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("wanted", ["good", "denied"])
async def test_more_replicas_that_are_refused_are_not_promised(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = await served(manifest(runtime={"image": "good"}))
    deny(monkeypatch, operator, "denied", most=1)
    respec(operator.cluster, replicas=3, runtime={"image": wanted})
    await some_turns(operator)
    assert (image(operator), replicas(operator)) == ("good", 1)
    message = operator.condition("Ready")["message"]
    assert message.endswith("The pods that run stay as they are."), message
    assert "Refused, too" not in message


async def test_a_disruption_budget_that_is_refused_holds_no_rollout() -> None:
    operator = await served(manifest(runtime={"image": "good"}))
    operator.cluster.refusing["PodDisruptionBudget"] = BUDGET_REFUSED
    respec(operator.cluster, replicas=2, runtime={"image": "better"})
    await some_turns(operator)
    assert (image(operator), replicas(operator)) == ("better", 2)
    assert operator.cluster.get(POD_DISRUPTION_BUDGET, "demo") is None
    assert "PodDisruptionBudget demo" in operator.condition("Ready")["message"]
    assert operator.condition("ModelReady")["status"] == "True"


@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "NetworkPolicy"])
async def test_a_revision_that_answers_is_current_while_another_object_is_refused(kind: str) -> None:
    """The pods do not wait for the object, so neither does what the status says of the rollout."""
    operator = await served(manifest(runtime={"image": "good"}))
    respec(operator.cluster, replicas=2, **PEERS)
    before = operator.status()["rollout"]["currentRevision"]
    if kind == "PodDisruptionBudget":  # no pod template waits for it
        operator.cluster.refusing[kind] = BUDGET_REFUSED
        respec(operator.cluster, runtime={"image": "better"})
        await some_turns(operator)
    else:
        respec(operator.cluster, runtime={"image": "better"})
        await operator.turn()
        operator.cluster.refusing[kind] = INVALID  # the Deployment has the new template already
        respec(operator.cluster, network={"ingress": [{"ipBlock": {"cidr": "10.2.0.0/16"}}]})
        await some_turns(operator)
    rollout = operator.status()["rollout"]
    assert (image(operator), rollout["phase"]) == ("better", "Complete")
    assert rollout["currentRevision"] == rollout["updateRevision"] != before
    assert f"{kind} demo" in operator.condition("Ready")["message"]
    again = FakeOperator(operator.cluster)
    await some_turns(again)
    assert again.status()["rollout"] == rollout


@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "NetworkPolicy"])
async def test_a_revision_that_does_not_answer_is_not_current_while_another_object_is_refused(kind: str) -> None:
    operator = await served(manifest(runtime={"image": "good"}))
    before = operator.status()["rollout"]["currentRevision"]
    operator.cluster.refusing[kind] = BUDGET_REFUSED
    operator.model.unreachable = "connection refused"
    respec(operator.cluster, replicas=2, runtime={"image": "better"}, **PEERS)
    await some_turns(operator)
    assert operator.status()["rollout"]["currentRevision"] == before


@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "NetworkPolicy"])
async def test_the_history_does_not_grow_while_an_object_is_refused(kind: str) -> None:
    operator = await served(manifest(runtime={"image": "good"}))
    operator.cluster.refusing[kind] = BUDGET_REFUSED
    respec(operator.cluster, replicas=2, **PEERS)
    for number in range(8):
        respec(operator.cluster, engine={"maxNumBatchedTokens": 1024 + number})
        await some_turns(operator)
    assert len(operator.cluster.all(CONTROLLER_REVISION)) <= HISTORY_LIMIT
    runs = mounted_maps([operator.cluster.the(DEPLOYMENT)["spec"]["template"]])
    maps = {one["metadata"]["name"] for one in operator.cluster.all(CONFIG_MAP)}
    assert runs <= maps, "what runs keeps its configuration"
    assert len(maps) <= HISTORY_LIMIT + 1


async def test_all_that_is_refused_is_named_what_holds_the_pods_first() -> None:
    operator = await served(manifest(runtime={"image": "good"}))
    operator.cluster.refusing |= {"PodDisruptionBudget": BUDGET_REFUSED, "NetworkPolicy": INVALID}
    respec(operator.cluster, replicas=2, **PEERS)
    await some_turns(operator)
    message = operator.condition("Ready")["message"]
    assert message.startswith("The API server refuses the NetworkPolicy demo")
    assert "Refused, too: PodDisruptionBudget demo." in message


async def test_a_field_that_only_the_answers_causes_name_is_in_the_message() -> None:
    operator = await served()
    body = {"details": {"causes": [{"field": FIELD, "reason": "FieldValueInvalid", "message": "x"}]}}
    operator.cluster.refusing["NetworkPolicy"] = ApiError(422, "Invalid", "NetworkPolicy is invalid", body=body)
    respec(operator.cluster, **PEERS)
    await some_turns(operator)
    assert f"the NetworkPolicy demo ({FIELD}): NetworkPolicy is invalid" in operator.condition("Ready")["message"]


async def test_a_policy_that_is_refused_does_not_hold_what_serves_while_the_spec_has_no_plan() -> None:
    operator = await served()
    operator.cluster.refusing["NetworkPolicy"] = INVALID
    respec(operator.cluster, replicas=2, speculation={"method": "EAGLE"}, **PEERS)
    await some_turns(operator)
    assert operator.condition("Ready")["reason"] == "UnsupportedByRuntime"
    assert replicas(operator) == 2


async def test_a_monitor_that_is_refused_holds_neither_the_other_nor_the_pods() -> None:
    operator = FakeOperator(world(manifest(monitoring={})))
    operator.cluster.installed |= {POD_MONITOR, PROMETHEUS_RULE}
    operator.cluster.refusing["PodMonitor"] = ApiError(422, "Invalid", "spec.podMetricsEndpoints[0].port: no")
    await some_turns(operator)
    assert operator.condition("Ready")["status"] == "True"
    assert "PodMonitor" in operator.condition("Monitored")["message"]
    assert operator.cluster.get(PROMETHEUS_RULE, "demo") is not None
    respec(operator.cluster, replicas=2)
    await some_turns(operator)
    assert replicas(operator) == 2
    assert operator.cluster.get(NETWORK_POLICY, "demo") is not None
