"""The secret that the probe's keys are derived from: made once, kept over restarts, rotated without a refused probe."""

from __future__ import annotations

import base64
import logging

import pytest

from millstream_operator.api.load import parse
from millstream_operator.facts.probe_key_secret import ProbeKeySecret
from millstream_operator.kube.client import ApiError
from millstream_operator.kube.kinds import SECRET
from tests.support.fake_cluster import FakeCluster, FakeClusterClient, Fault
from tests.support.llmdeployments import deployment, manifest

OWNER = deployment()
NAMESPACE, NAME = "millstream-system", "millstream-probe-key"


def cluster_with(**values: str) -> FakeCluster:
    cluster = FakeCluster()
    data = {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
    metadata = {"name": NAME, "namespace": NAMESPACE}
    cluster.put({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, **({"data": data} if data else {})})
    return cluster


def process(cluster: FakeCluster, fault: Fault | None = None) -> ProbeKeySecret:
    return ProbeKeySecret(FakeClusterClient(cluster, fault), NAMESPACE, NAME)


async def test_the_key_is_made_once_and_every_process_has_the_same(caplog: pytest.LogCaptureFixture) -> None:
    cluster = cluster_with()
    with caplog.at_level(logging.DEBUG):
        first = process(cluster)
        assert await first.refresh()
        assert not await first.refresh()
        second = process(cluster)
        await second.refresh()
    assert first.ring.key(OWNER) == second.ring.key(OWNER) is not None
    secret = base64.b64decode(cluster.the(SECRET, NAME, NAMESPACE)["data"]["key"]).decode()
    key = str(first.ring.key(OWNER))
    assert secret not in caplog.text + repr(first.ring)
    assert key not in caplog.text + repr(first.ring)


async def test_each_model_has_a_key_of_its_own() -> None:
    """A pod that catches the probe's request cannot ask another model with it, nor a namesake that comes later."""
    secret = process(cluster_with())
    await secret.refresh()
    recreated = manifest()
    recreated["metadata"]["uid"] = "5f0c3a52-0000-4000-8000-000000000002"
    owners = [OWNER, deployment("other"), parse(recreated)]
    assert len({secret.ring.key(owner) for owner in owners}) == 3


async def test_while_it_is_rotated_pods_accept_both_and_the_operator_sends_the_first() -> None:
    cluster = cluster_with(key="a" * 64)
    secret = process(cluster)
    await secret.refresh()
    old_key, old = secret.ring.key(OWNER), secret.ring.digests(OWNER)
    cluster.put(cluster_with(key="a" * 64, next="b" * 64).the(SECRET, NAME, NAMESPACE))
    assert await secret.refresh()
    assert secret.ring.key(OWNER) == old_key
    both = secret.ring.digests(OWNER)
    assert both[:1] == old
    assert len(both) == 2
    cluster.put(cluster_with(key="b" * 64).the(SECRET, NAME, NAMESPACE))
    assert await secret.refresh()
    assert secret.ring.key(OWNER) not in (None, old_key)
    assert secret.ring.digests(OWNER) == both[1:]


@pytest.mark.parametrize("bad", ["", "short", "x" * 64, "\u00e9" * 64])
async def test_a_value_that_is_no_key_is_replaced(bad: str) -> None:
    cluster = cluster_with(key=bad, next=bad)
    secret = process(cluster)
    await secret.refresh()
    assert len(secret.ring.secrets) == 1
    assert base64.b64decode(cluster.the(SECRET, NAME, NAMESPACE)["data"]["key"]).decode() != bad


async def test_without_the_secret_or_the_right_to_it_a_process_has_a_key_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    denied = Fault(0, ApiError(403, "Forbidden", "no"), writes_only=False)
    unwritable = Fault(0, ApiError(403, "Forbidden", "no"))
    for secret in (process(FakeCluster()), process(cluster_with(), denied), process(cluster_with(), unwritable)):
        assert await secret.refresh()
        key = secret.ring.key(OWNER)
        assert key is not None
        assert key not in caplog.text
    lone = process(FakeCluster())
    await lone.refresh()
    assert not await lone.refresh(), "as long as the process lives"


async def test_an_api_server_that_is_away_changes_nothing() -> None:
    cluster = cluster_with(key="a" * 64)
    client = FakeClusterClient(cluster)
    secret = ProbeKeySecret(client, NAMESPACE, NAME)
    await secret.refresh()
    before = secret.ring
    client.fault = Fault(len(client.requests), ApiError(503, "ServiceUnavailable", "later"), writes_only=False)
    with pytest.raises(ApiError):
        await secret.refresh()
    assert secret.ring == before
