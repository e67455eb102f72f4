"""What drafts do in the pods reaches status and journal: an entry per lasting change, and no write without one."""

from __future__ import annotations

from typing import Any

from millstream_operator.kube.kinds import POD
from tests.support.fake_operator import FakeOperator, respec, served
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
GOVERNED: Manifest = {"speculation": {"method": "NGram", "maxDraftTokens": 4}, "replicas": 2}


class Traffic:
    """Requests to every pod: in a minute each pod decodes `decodes` tokens, with drafts or without."""

    def __init__(self, operator: FakeOperator) -> None:
        self.operator, self.totals = operator, dict[str, dict[str, int]]()

    async def minute(self, *, drafts: bool = True, decodes: int = 300, accepted_percent: int = 50) -> None:
        operator = self.operator
        for pod in operator.cluster.all(POD):
            totals = self.totals.setdefault(
                pod["metadata"]["name"], {"checks": 0, "draftTokens": 0, "acceptedTokens": 0, "no_gain": 0}
            )
            checks = decodes if drafts else decodes // 100
            totals["checks"] += checks
            totals["draftTokens"] += 4 * checks
            totals["acceptedTokens"] += 4 * checks * accepted_percent // 100
            totals["no_gain"] += decodes - checks
            counts: Manifest = {name: value for name, value in totals.items() if name != "no_gain"}
            counts |= {"skipped": {"no_gain": totals["no_gain"]}}
            report: Manifest = {
                "phase": "Ready",
                "speculation": {"method": "NGram", "maxDraftTokens": 4, "governor": "Enforce", **counts},
            }
            operator.pods.reports[pod["metadata"]["name"]] = report | operator.model.running(pod["metadata"]["labels"])
        await operator.ask_pods(60.0)
        while operator.woken:
            operator.woken.clear()
            await operator.turn()

    async def minutes(self, count: int, **growth: Any) -> None:
        for _ in range(count):
            await self.minute(**growth)


def entries(operator: FakeOperator) -> list[str]:
    """The journal's words about speculation, oldest first."""
    journal = operator.status()["decisions"]
    return [entry["message"] for entry in reversed(journal) if entry["type"] == "SpeculationChanged"]


def status_writes(operator: FakeOperator) -> int:
    return sum(kind.endswith("/status") for _, kind in operator.writes)


async def test_measured_acceptance_stands_beside_what_the_plan_expects() -> None:
    operator = await served(manifest(**GOVERNED))
    assert "speculation" not in operator.status(), "nothing was measured yet"
    await Traffic(operator).minutes(6)
    found = operator.status()["speculation"]
    plan = operator.status()["plan"]["speculation"]
    assert found.pop("lastTransitionTime")
    assert found == {
        "revision": operator.status()["rollout"]["currentRevision"],
        "state": "Drafting",
        "acceptedPercent": 50,
        "assumedAcceptancePercent": plan["assumedAcceptancePercent"],
        "mostSpeedupPercent": plan["mostSpeedupPercent"],
    }
    assert entries(operator) == [], "it drafts, as the plan says"


async def test_a_workload_that_changes_and_changes_back_has_one_entry_each_way() -> None:
    operator = await served(manifest(**GOVERNED))
    traffic = Traffic(operator)
    await traffic.minutes(15)
    await traffic.minutes(20, drafts=False, accepted_percent=5)
    (stopped,) = entries(operator)
    assert "drafts in few decodes now, since a check costs more than it gains: " in stopped
    assert "% of the drafts that were checked stood; the plan assumes 40 %." in stopped
    assert operator.status()["speculation"]["state"] == "NotDrafting"
    await traffic.minutes(20)
    assert len(entries(operator)) == 2
    assert "drafts again in most decodes" in entries(operator)[1]
    assert operator.status()["speculation"]["state"] == "Drafting"


async def test_without_a_change_nothing_is_written() -> None:
    operator = await served(manifest(**GOVERNED))
    traffic = Traffic(operator)
    await traffic.minutes(10)
    operator.client.requests.clear()
    operator.pods.asked.clear()
    await traffic.minutes(10)
    await traffic.minutes(10, decodes=0)
    for _ in range(3):
        await operator.turn()
    assert operator.writes == []
    assert len(operator.pods.asked) > 20, "the pods were asked all the time"


async def test_an_operator_that_is_started_again_repeats_no_entry() -> None:
    operator = await served(manifest(**GOVERNED))
    traffic = Traffic(operator)
    await traffic.minutes(10)
    await traffic.minutes(20, drafts=False)
    before = operator.status()
    assert len(entries(operator)) == 1
    again = FakeOperator(operator.cluster, model=operator.model)
    again.now, again.seconds = operator.now, 5.0
    traffic.operator = again
    await again.turn()
    await traffic.minutes(10, drafts=False)
    assert again.status()["speculation"] == before["speculation"]
    assert again.status()["decisions"] == before["decisions"]
    assert status_writes(again) == 0


async def test_a_pod_that_does_not_answer_changes_nothing() -> None:
    operator = await served(manifest(**GOVERNED))
    traffic = Traffic(operator)
    await traffic.minutes(10)
    operator.client.requests.clear()
    for pod in operator.cluster.all(POD):
        operator.pods.reports[pod["metadata"]["name"]] = {"phase": "Ready", "speculation": "none of yours"}
    for _ in range(30):
        await operator.ask_pods(60.0)
    await operator.turn()
    assert operator.woken == []
    assert operator.writes == []


async def test_where_nothing_is_proposed_no_pod_is_asked() -> None:
    operator = await served(manifest(replicas=2))
    operator.pods.asked.clear()
    for _ in range(10):
        await operator.ask_pods(60.0)
    assert operator.pods.asked == []
    assert "speculation" not in operator.status()


async def test_speculation_that_is_switched_off_leaves_the_status() -> None:
    operator = await served(manifest(**GOVERNED))
    await Traffic(operator).minutes(6)
    assert "speculation" in operator.status()
    respec(operator.cluster, speculation=None)
    await operator.settle()
    assert "speculation" not in operator.status()
