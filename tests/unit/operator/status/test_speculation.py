"""What drafts do in the pods reaches status and journal: an entry per lasting change, and no write without one."""

from __future__ import annotations

from typing import Any

from millstream_operator.kube.kinds import POD
from tests.support.fake_operator import FakeOperator, respec, served
from tests.support.llmdeployments import manifest

Manifest = dict[str, Any]
GOVERNED: Manifest = {"speculation": {"method": "NGram", "maxDraftTokens": 4}, "replicas": 2}

TOTALS = ("checks", "draftTokens", "acceptedTokens", "no_gain", "drafter_failed")


class Traffic:
    """Requests to every pod: in a minute each pod decodes `decodes` tokens, with drafts or without. `failed`: names of
    pods whose drafter has failed."""

    def __init__(self, operator: FakeOperator) -> None:
        self.operator, self.totals, self.failed = operator, dict[str, dict[str, int]](), set[str]()

    async def minute(self, *, drafts: bool = True, decodes: int = 300, accepted_percent: int = 50) -> None:
        operator = self.operator
        for pod in operator.cluster.all(POD):
            name = pod["metadata"]["name"]
            totals = self.totals.setdefault(name, dict.fromkeys(TOTALS, 0))
            if name in self.failed:
                totals["drafter_failed"] += decodes
            checks = 0 if name in self.failed else decodes if drafts else decodes // 100
            totals["checks"] += checks
            totals["draftTokens"] += 4 * checks
            totals["acceptedTokens"] += 4 * checks * accepted_percent // 100
            totals["no_gain"] += 0 if name in self.failed else decodes - checks
            reasons = ("no_gain", "drafter_failed")
            counts: Manifest = {name: value for name, value in totals.items() if name not in reasons}
            counts |= {"skipped": {reason: totals[reason] for reason in reasons}}
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


def entries(operator: FakeOperator, type_: str = "SpeculationChanged") -> list[str]:
    """The journal's words about speculation, oldest first."""
    journal = operator.status()["decisions"]
    return [entry["message"] for entry in reversed(journal) if entry["type"] == type_]


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


async def test_one_pod_of_four_whose_drafter_failed_is_named_once() -> None:
    operator = await served(manifest(**GOVERNED | {"replicas": 4}))
    traffic = Traffic(operator)
    await traffic.minutes(10)
    first, second, *_ = sorted(pod["metadata"]["name"] for pod in operator.cluster.all(POD))
    traffic.failed = {second}
    await traffic.minutes(2)
    (entry,) = entries(operator, "DrafterFailed")
    assert f"the drafter raised an error or gave NaN in {second}. " in entry
    assert "drafter_failed in the pod's log" in entry
    assert operator.status()["speculation"]["failedPods"] == [second]
    operator.client.requests.clear()
    await traffic.minutes(30)
    assert operator.status()["speculation"]["state"] == "Drafting", "three of four draft"
    assert (entries(operator), operator.writes) == ([], [])
    traffic.failed = {first, second}
    await traffic.minutes(2)
    assert f" in {first}, {second}. " in entries(operator, "DrafterFailed")[1]
    traffic.failed, traffic.totals = set(), {}  # the pods' engines were started anew
    await traffic.minutes(2)
    assert "failedPods" not in operator.status()["speculation"]
    assert len(entries(operator, "DrafterFailed")) == 2


async def test_a_drafter_that_failed_before_the_operator_was_started_again_has_one_entry() -> None:
    operator = await served(manifest(**GOVERNED))
    traffic = Traffic(operator)
    traffic.failed = {pod["metadata"]["name"] for pod in operator.cluster.all(POD)}
    await traffic.minutes(20)
    before = operator.status()
    named = entries(operator, "DrafterFailed")
    assert all(pod in named[-1] for pod in traffic.failed)
    again = FakeOperator(operator.cluster, model=operator.model)
    again.now, again.seconds = operator.now, 5.0
    traffic.operator = again
    await again.turn()
    await traffic.minutes(10)
    assert again.status()["speculation"] == before["speculation"]
    assert again.status()["decisions"] == before["decisions"]
    assert status_writes(again) == 0


async def test_a_failed_pod_that_is_gone_leaves_the_status() -> None:
    operator = await served(manifest(**GOVERNED))
    traffic = Traffic(operator)
    await traffic.minutes(5)
    gone = max(pod["metadata"]["name"] for pod in operator.cluster.all(POD))
    traffic.failed = {gone}
    await traffic.minutes(2)
    assert operator.status()["speculation"]["failedPods"] == [gone]
    respec(operator.cluster, replicas=1)
    await operator.settle()
    left = {pod["metadata"]["name"] for pod in operator.cluster.all(POD)}
    assert operator.status()["speculation"].get("failedPods", []) == [one for one in [gone] if one in left]


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
