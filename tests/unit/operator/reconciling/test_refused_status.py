"""A status that the API server refuses: what is accepted is written, what is missing is named, and nothing loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pydantic
import pytest

from millstream_operator.api.status import LLMDeploymentStatus
from millstream_operator.kube.client import ApiError
from millstream_operator.kube.kinds import LLM_DEPLOYMENT
from millstream_operator.reconciling import report
from millstream_operator.status.status import status_of
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeOperator, respec, served
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]


class ValidatingCluster(FakeCluster):
    """Holds a status to its schema, as the API server does."""

    def __init__(self, *, names_fields: bool = True) -> None:
        super().__init__()
        self.names_fields, self.refused = names_fields, 0

    def apply(self, manifest: Mapping[str, Any], subresource: str | None) -> Manifest:
        if subresource == "status":
            self._validate(manifest["status"])
        return super().apply(manifest, subresource)

    def _validate(self, status: Manifest) -> None:
        try:
            LLMDeploymentStatus.model_validate(status, strict=False)
        except pydantic.ValidationError as problem:
            self.refused += 1
            fields = [".".join(["status", *map(str, one["loc"])]) for one in problem.errors()]
            causes = [{"reason": "FieldValueInvalid", "field": field} for field in fields if self.names_fields]
            said = fields[0] if self.names_fields else "it"
            body = {"kind": "Status", "details": {"causes": causes}}
            message = f'LLMDeployment "demo" is invalid: {said}: Invalid value: -1: should be at least 0'
            raise ApiError(422, "Invalid", message, body=body) from None


Spoil = Callable[[Manifest], object]


def negative_weights(status: Manifest) -> None:
    status["memory"] = {"predicted": {"weightsBytes": -1}, "measured": {"weightsBytes": 1}}


def long_summary(status: Manifest) -> None:
    status["plan"] = {**status["plan"], "summary": "x" * 100_000}


def long_message(status: Manifest) -> None:
    for one in status["conditions"]:
        if one["type"] == "Planned":
            one["message"] = "x" * 100_000


@pytest.fixture
def bug(monkeypatch: pytest.MonkeyPatch) -> Callable[[Spoil], None]:
    """Let the operator make a status that does not fit its schema."""

    def begin(spoil: Spoil) -> None:
        def spoiled(*arguments: Any) -> Manifest:
            made = status_of(*arguments)
            spoil(made)
            return made

        monkeypatch.setattr(report, "status_of", spoiled)

    return begin


def validating(**options: Any) -> FakeOperator:
    cluster = ValidatingCluster(**options)
    cluster.put(manifest())
    return FakeOperator(cluster)


async def settled(operator: FakeOperator) -> FakeOperator:
    await operator.settle()
    operator.client.requests.clear()
    return operator


SPOILED = {
    "a wrong figure": (negative_weights, "status.memory.predicted"),
    "a wrong plan": (long_summary, "status.plan"),
    "a condition that is too long": (long_message, "status.conditions"),
}


@pytest.mark.parametrize("names_fields", [True, False], ids=["named", "not named"])
@pytest.mark.parametrize("name", SPOILED)
async def test_everything_else_is_reported_and_the_refused_part_is_named(
    name: str, names_fields: bool, bug: Callable[[Spoil], None]
) -> None:
    spoil, part = SPOILED[name]
    bug(spoil)
    operator = await settled(validating(names_fields=names_fields))
    assert operator.condition("Ready")["status"] == "True"
    incomplete = operator.condition("StatusIncomplete")
    assert (incomplete["status"], incomplete["reason"]) == ("True", "StatusRefused")
    assert part.partition(".")[2].partition(".")[0] in incomplete["message"]
    assert "Invalid value: -1" in incomplete["message"]
    status = operator.status()
    assert (status["availableReplicas"], status["selector"]) == (
        1,
        "millstream.dev/deployment=demo,millstream.dev/role=leader",
    )
    if name == "a wrong figure" and names_fields:
        assert "predicted" not in status["memory"]
        assert status["plan"]["summary"], "only the part with the wrong figure is missing"
    LLMDeploymentStatus.model_validate(status, strict=False)


@pytest.mark.parametrize("name", SPOILED)
async def test_a_refused_status_is_not_sent_again_and_again(name: str, bug: Callable[[Spoil], None]) -> None:
    bug(SPOILED[name][0])
    operator = await settled(validating())
    cluster = operator.cluster
    assert isinstance(cluster, ValidatingCluster)
    before = cluster.refused
    for _ in range(5):
        operator.now = "2025-02-02T00:00:00Z"
        await operator.turn()
    assert operator.client.requests == []
    assert cluster.refused == before
    version = cluster.version
    restarted = FakeOperator(cluster)
    for _ in range(5):
        await restarted.turn()
    assert len(restarted.writes) <= 5, "it is tried once after a restart"
    assert cluster.refused <= before + 4
    assert cluster.version == version, "and nothing changes by it"


async def test_the_condition_goes_with_the_next_status_that_is_accepted(bug: Callable[[Spoil], None]) -> None:
    bug(negative_weights)
    operator = await settled(validating())
    bug(lambda _: None)
    respec(operator.cluster, engine={"maxNumSeqs": 8})
    await operator.settle()
    assert operator.condition("StatusIncomplete") == {}


async def test_a_refused_spec_is_reported_although_its_status_was_refused(bug: Callable[[Spoil], None]) -> None:
    bug(negative_weights)
    operator = await settled(validating())
    respec(operator.cluster, engine={"maxNumSeqs": -1})
    await operator.turn()
    assert operator.condition("Ready")["reason"] == "InvalidSpec"


async def test_another_error_is_no_reason_to_leave_anything_out() -> None:
    operator = await served()
    operator.cluster.edit(LLM_DEPLOYMENT, "demo", lambda live: live["status"].update(url="x"))
    raised = [ApiError(500, "InternalError", "etcd is away"), ApiError(403, "Forbidden", "no right")]

    async def fails(manifest: Manifest, subresource: str | None = None) -> Manifest:
        raise raised.pop()

    apply, operator.client.apply = operator.client.apply, fails  # type: ignore[assignment, method-assign]
    for _ in range(2):
        await operator.turn()
    operator.client.apply = apply  # type: ignore[method-assign]
    await operator.settle()
    assert operator.condition("StatusIncomplete") == {}
