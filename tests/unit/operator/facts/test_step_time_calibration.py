"""Step times that a runtime measured correct the latencies of later plans."""

from __future__ import annotations

import pytest

from millstream_operator.kube.kinds import CONFIG_MAP, CONTROLLER_REVISION
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_operator import FakeModel, FakeOperator, world
from tests.support.llmdeployments import manifest
from tests.support.measured_models import (
    MEASURED,
    NAME,
    SYSTEM,
    add,
    entries,
    gpu_world,
    plan_of,
)

STEPS = [
    {"sequences": 1, "new_tokens": 1, "context_tokens": 7, "step_microseconds": 14_000},
    {"sequences": 256, "new_tokens": 256, "context_tokens": 1792, "step_microseconds": 20_000},
    {"sequences": 1, "new_tokens": 2048, "context_tokens": 0, "step_microseconds": 170_000},
]


async def timed(cluster: FakeCluster, steps: object = STEPS) -> FakeOperator:
    model = FakeModel(cluster)
    model.ready = {"phase": "Ready", "memory": MEASURED, "step_times": steps}
    operator = FakeOperator(cluster, model=model)
    await operator.settle()
    return operator


async def test_step_times_flow_back_and_correct_the_latencies_of_a_later_plan() -> None:
    cluster = gpu_world()
    operator = await timed(cluster)
    times = operator.status()["stepTimes"]
    assert times["measured"] == {
        "decodeMicroseconds": 14_000,
        "batchMicroseconds": 20_000,
        "batchSequences": 256,
        "prefillMicroseconds": 170_000,
        "prefillTokens": 2048,
    }
    assert "correction" not in times
    assert times["predicted"]["decodeMicroseconds"] == 11_386
    ((_, entry),) = entries(cluster).items()
    found = entry.correction
    assert (found.decode_permille, found.batch_sequences) == (-(-14_000_000 // 11_386), 256)
    add(cluster, "later")
    await operator.settle("later")
    before, after = plan_of(cluster, "demo"), plan_of(cluster, "later")
    running = after["predicted"]["concurrentSequences"]
    itl, corrected = (plan["predicted"]["itlMicroseconds"] for plan in (before, after))
    assert corrected - itl == pytest.approx(20_000 - times["predicted"]["batchMicroseconds"], rel=0.03)
    ttft, slower = (plan["predicted"]["ttftMilliseconds"] for plan in (before, after))
    assert slower == pytest.approx(ttft * found.prefill_permille / 1000, abs=1)
    (reason,) = [one["reason"] for one in after["reasons"] if one["field"] == "predicted" and "TTFT" in one["reason"]]
    assert f"the roofline's × {found.decode_factor(running):.2f}" in reason
    (used,) = after["calibration"]
    assert (used["decodePermille"], used["batchSequences"]) == (found.decode_permille, 256)
    later = operator.status("later")["stepTimes"]
    assert later["correction"]["decodePermille"] == found.decode_permille
    assert later["predicted"]["decodeMicroseconds"] == pytest.approx(14_000, abs=20)


async def test_an_objective_is_judged_by_the_corrected_latency() -> None:
    """An ITL that the roofline promises and the measured steps do not keep is refused."""
    itl = {"objectives": {"itl": {"p95": "70ms"}}}
    cluster = gpu_world()
    add(cluster, "before", **itl)
    operator = FakeOperator(cluster)
    await operator.settle("before")
    assert operator.condition("Ready", "before")["reason"] == "Ready"
    measured_there = gpu_world()
    timed_there = await timed(measured_there)
    add(measured_there, "after", **itl)
    await timed_there.settle("after")
    assert timed_there.condition("Ready", "after")["reason"] == "Infeasible"
    assert "ITL" in timed_there.condition("Ready", "after")["message"]


async def test_step_times_change_no_plan_that_runs() -> None:
    cluster = gpu_world(runtime={"updatePolicy": "FollowOperator"}, objectives={"itl": {"p95": "70ms"}})
    operator = await timed(cluster)
    records = cluster.all(CONTROLLER_REVISION)
    for process in (operator, FakeOperator(cluster, model=operator.model)):
        await process.calibration.load()
        process.facts.stamp += 1
        await process.settle()
        assert process.condition("PlanOutdated") == {}
    assert cluster.all(CONTROLLER_REVISION) == records


@pytest.mark.parametrize(
    "steps",
    [
        "fast",
        [{"sequences": 1}],
        [{"sequences": 0, "new_tokens": 0, "context_tokens": 0, "step_microseconds": 1}],
        [{"sequences": 4, "new_tokens": 1, "context_tokens": 0, "step_microseconds": 1}],
        [{"sequences": 1, "new_tokens": 1, "context_tokens": 7, "step_microseconds": -1}],
        [{"sequences": True, "new_tokens": 1, "context_tokens": 7, "step_microseconds": 1}],
        [{"sequences": 1, "new_tokens": 1, "context_tokens": 7, "step_microseconds": 90_000_000}],
    ],
)
async def test_a_step_time_that_cannot_be_true_corrects_nothing(steps: object) -> None:
    cluster = gpu_world()
    await timed(cluster, steps)
    assert [one.correction.has_steps for one in entries(cluster).values()] == [False]


async def test_a_batch_of_an_impossible_size_leaves_what_is_known_readable() -> None:
    """A record with it would be dropped when it is read, and with it the corrections of its memory."""
    cluster = gpu_world()
    operator = await timed(cluster, [])
    for micros in (1, 1 << 50):
        lie = [{"sequences": 1 << 21, "new_tokens": 1 << 21, "context_tokens": 0, "step_microseconds": micros}]
        other = gpu_world()
        status = (await timed(other, lie)).status()
        assert "batchSequences" not in (status.get("stepTimes") or {}).get("measured", {})
        assert entries(other) == entries(cluster)
    assert operator.condition("Ready")["status"] == "True"


async def test_a_cpu_reports_its_step_times_and_predicts_none() -> None:
    cluster = world(manifest())
    operator = await timed(cluster)
    assert operator.status()["stepTimes"]["measured"]["decodeMicroseconds"] == 14_000
    assert "predicted" not in operator.status()["stepTimes"]
    assert cluster.get(CONFIG_MAP, NAME, SYSTEM) is None
