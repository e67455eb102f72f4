"""A Service of others that selects the model's pods by labels of the spec: a condition names it, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.children.foreign_services import LISTED_SECONDS, ForeignServices, selected_by
from millstream_operator.kube.client import ApiError
from millstream_operator.kube.kinds import SERVICE, Kind
from tests.support.fake_operator import respec, served
from tests.support.llmdeployments import NAMESPACE, deployment, manifest

Manifest = dict[str, Any]
LABELS = {"app": "payments", "tier": "backend"}


def service(selector: dict[str, str] | None, name: str = "payments", namespace: str = NAMESPACE) -> Manifest:
    spec: Manifest = {"ports": [{"port": 80}]} | ({} if selector is None else {"selector": selector})
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def test_a_service_selects_by_all_labels_of_its_selector() -> None:
    for selector in ({"app": "payments"}, LABELS, {"app": "payments", "millstream.dev/role": "leader"}):
        labels = {**LABELS, "millstream.dev/role": "leader"}
        found = selected_by(labels, [service(selector)])
        assert found is not None
        assert found.status is True
        assert "Service payments of this namespace" in found.message
        assert "app" in found.message
        assert "podTemplate.metadata.labels" in found.message
    for selector in ({"app": "other"}, {**LABELS, "more": "x"}, {"millstream.dev/role": "leader"}):
        labels = {**LABELS, "millstream.dev/role": "leader"}
        assert selected_by(labels, [service(selector)]) is None


def test_several_services_are_named_and_no_more_than_some() -> None:
    found = selected_by(LABELS, [service({"app": "payments"}, f"s{number}") for number in range(7)])
    assert found is not None
    assert "Services s0, s1, s2, s3 and 3 more of this namespace" in found.message


class CountingClient:
    """Answers a listing of Services, or refuses it."""

    def __init__(self, listed: list[Manifest], status: int = 200) -> None:
        self.listed, self.status = listed, status
        self.asked: list[str] = []

    async def list(self, kind: Kind, namespace: str | None, selector: str | None) -> tuple[list[Manifest], str]:
        assert (kind, selector) == (SERVICE, None)
        self.asked.append(str(namespace))
        if self.status != 200:
            raise ApiError(self.status, "", "no")
        return self.listed, "1"


def template(**labels: str) -> Manifest:
    return {"metadata": {"labels": {"millstream.dev/deployment": "demo", "app.kubernetes.io/name": "x", **labels}}}


async def test_services_are_listed_only_for_labels_of_the_spec_and_once_a_minute() -> None:
    client, now = CountingClient([service({"app": "payments"}), service(None, "headless")]), [0.0]
    services = ForeignServices(client, lambda: now[0])  # type: ignore[arg-type]  # what it asks of a client
    owner = deployment()
    assert await services.selecting(owner, template()) is None
    assert client.asked == []
    for _ in range(3):
        assert await services.selecting(owner, template(app="payments")) is not None
    assert client.asked == [NAMESPACE]
    client.listed = []
    now[0] = LISTED_SECONDS
    assert await services.selecting(owner, template(app="payments")) is None
    assert client.asked == [NAMESPACE] * 2


@pytest.mark.parametrize("status", [403, 404])
async def test_without_the_right_to_list_them_nothing_is_said(status: int) -> None:
    services = ForeignServices(CountingClient([], status))  # type: ignore[arg-type]
    assert await services.selecting(deployment(), template(app="payments")) is None


async def test_the_condition_is_there_while_it_is_true_and_the_model_serves() -> None:
    operator = await served(manifest())
    operator.cluster.put(service({"app": "payments"}))
    await operator.settle()
    assert operator.condition("SelectedByOthers") == {}, "the pods have no label of the spec"
    respec(operator.cluster, podTemplate={"metadata": {"labels": LABELS}})
    await operator.settle()
    found = operator.condition("SelectedByOthers")
    assert (found["status"], found["reason"]) == ("True", "SelectedByOthers")
    respec(operator.cluster, podTemplate={"metadata": {"labels": {"app": "chat"}}})
    await operator.settle()
    assert operator.condition("SelectedByOthers") == {}
