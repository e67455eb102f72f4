"""Traffic shifts in stages to a model that passed its gate; worse pods go back, and no replica is ever missed."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, POD
from millstream_operator.rendering.deployment import HELD_MIN_READY_SECONDS
from tests.support.fake_operator import respec, world
from tests.support.llmdeployments import manifest
from tests.support.prepared_models import GATE, JUDGED
from tests.support.rollout_world import World, image

Manifest = dict[str, Any]


async def serving(replicas: int = 4, **spec: Any) -> World:
    """A world in which the old model serves, and whose pods can be read."""
    one = World(world(manifest(replicas=replicas, **image("good"), **spec)))
    one.controller.owned = True
    await one.settle()
    assert one.operator.condition("Ready")["status"] == "True"
    one.controller.fewest_available, one.controller.most_pods = 1 << 10, 0
    return one


async def shifting(replicas: int = 4, **spec: Any) -> World:
    """As `serving`, and another model passed its gate: its first pod is ready."""
    one = await serving(replicas, **spec)
    await one.apply(**JUDGED)
    assert new_pods(one) == 1
    return one


def digest(one: World) -> str:
    """Of the newest revision."""
    newest = max(one.cluster.all(CONTROLLER_REVISION), key=lambda record: int(record["revision"]))
    return str(newest["metadata"]["labels"]["millstream.dev/revision"])


def pods_of(one: World, *, new: bool) -> list[Manifest]:
    wanted = digest(one)
    return [
        pod
        for pod in one.controller.available()
        if (pod["metadata"]["labels"]["millstream.dev/revision"] == wanted) is new
    ]


def new_pods(one: World) -> int:
    return len(pods_of(one, new=True))


def answer(one: World, *, new: bool, stop: int = 0, error: int = 0) -> None:
    """The pods' counters from now on, each the same."""
    for pod in pods_of(one, new=new):
        one.operator.pods.expositions[pod["metadata"]["name"]] = "".join(
            f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="demo"}} {count}.0\n'
            for reason, count in (("stop", stop), ("length", 0), ("error", error), ("abort", 3))
        )


async def wait(one: World, seconds: float) -> None:
    one.operator.seconds += seconds
    await one.settle()


def held(one: World) -> bool:
    found = one.cluster.the(DEPLOYMENT)["spec"]
    return bool(found.get("minReadySeconds", 0) == HELD_MIN_READY_SECONDS)


async def test_an_idle_model_moves_on_by_time_through_every_stage() -> None:
    one = await shifting(8)
    seen = [new_pods(one)]
    for _ in range(4):
        await wait(one, 299)
        assert new_pods(one) == seen[-1], "not before the stage's time"
        await wait(one, 11)
        seen.append(new_pods(one))
    assert seen == [1, 2, 4, 8, 8]
    assert not held(one)
    assert one.operator.condition("Ready")["status"] == "True"
    assert (one.controller.fewest_available, one.controller.most_pods) == (8, 9)
    types = [kind for kind in reversed(one.decisions) if kind.startswith("Traffic")]
    assert types == ["TrafficShiftStarted"] + 4 * ["TrafficShifted"]
    messages = [entry["message"] for entry in reversed(one.status["decisions"]) if entry["type"] == "TrafficShifted"]
    assert "stage 2 of 4 passed with 2 of 8 replicas" in messages[1]
    assert "could not be read, so nothing was compared" in messages[1]


async def test_a_busy_model_moves_on_after_enough_requests() -> None:
    one = await shifting()
    answer(one, new=True)
    answer(one, new=False, stop=500)
    await wait(one, 11)
    answer(one, new=True, stop=60)
    await wait(one, 11)
    assert new_pods(one) == 1, "half a minute at least"
    await wait(one, 11)
    assert new_pods(one) == 2
    (entry,) = [one["message"] for one in one.status["decisions"] if one["type"] == "TrafficShifted"]
    assert "errors in 0 of 60 of its requests, in 0 of 2000 of the old pods'" in entry
    assert "stage 2 of 3 (2 of 4 replicas)" in one.operator.condition("Ready")["message"]


async def test_while_a_stage_is_compared_nothing_is_written() -> None:
    one = await shifting()
    answer(one, new=True, stop=1)
    answer(one, new=False, stop=500)
    await wait(one, 11)
    one.operator.client.requests.clear()
    for _ in range(5):
        await wait(one, 11)
    assert one.operator.writes == []


@pytest.mark.parametrize("stage", [1, 2, 3])
async def test_worse_pods_are_taken_back_and_no_replica_is_missed(stage: int) -> None:
    one = await shifting()
    for _ in range(stage - 1):
        await wait(one, 310)
    answer(one, new=False, stop=500)
    answer(one, new=True, stop=10, error=10)
    await wait(one, 11)
    assert one.operator.condition("Ready")["reason"] == "RolledBack"
    message = one.operator.condition("Ready")["message"]
    assert "CanaryFailed: Compared with the old pods" in message
    assert "of its requests ended with an error" in message
    assert (one.controller.fewest_available, len(one.controller.available())) == (4, 4)
    assert one.operator.condition("Available")["status"] == "True"
    assert not held(one)
    assert one.decisions[0] == "RolledBack"
    made = len(one.controller.made)
    await wait(one, 10_000)
    one.restart()
    await wait(one, 10_000)
    assert len(one.controller.made) == made, "it is not tried again until the spec changes"


async def test_a_container_that_begins_anew_is_worse() -> None:
    one = await shifting()
    await wait(one, 11)
    name = pods_of(one, new=True)[0]["metadata"]["name"]
    crashed = {"containerStatuses": [{"name": "runtime", "restartCount": 1, "state": {"running": {}}}]}
    ready = [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}]
    one.cluster.set_status(POD, name, crashed | {"conditions": ready})
    await wait(one, 11)
    assert one.decisions[0] == "RolledBack"


async def test_another_process_of_the_operator_goes_on_from_the_same_stage() -> None:
    one = await shifting(8)
    await wait(one, 310)
    await wait(one, 310)
    assert new_pods(one) == 4
    one.restart()
    await one.settle()
    assert one.operator.client.written == [], "nothing is changed"
    await wait(one, 290)
    assert new_pods(one) == 4, "the stage is compared anew"
    await wait(one, 20)
    assert new_pods(one) == 8
    one.restart()
    await wait(one, 0)
    await wait(one, 310)
    assert one.operator.condition("Ready")["status"] == "True"
    assert one.controller.fewest_available == 8
    assert sum(kind == "TrafficShifted" for kind in one.decisions) == 4


async def test_an_operator_that_dies_at_any_write_of_the_last_stage_ends_the_same() -> None:
    one = await shifting(2)
    await wait(one, 310)
    for _ in range(6):  # each process makes one turn of the rest
        one.restart()
        await one.operator.turn()
        one.operator.seconds += 310
        await one.operator.turn()
        one.controller.step()
    await one.settle()
    assert one.operator.condition("Ready")["status"] == "True"
    assert one.controller.fewest_available == 2


async def test_scaling_keeps_the_share_and_misses_no_replica() -> None:
    one = await shifting(4)
    await wait(one, 310)
    assert new_pods(one) == 2
    await one.apply(replicas=8)
    assert (new_pods(one), len(one.controller.available())) == (4, 9)
    one.controller.fewest_available = 1 << 10
    await wait(one, 290)
    await one.apply(replicas=4)
    assert new_pods(one) <= 2
    assert one.controller.fewest_available >= 4
    for _ in range(3):
        await wait(one, 310)
    assert one.operator.condition("Ready")["status"] == "True"
    assert one.controller.fewest_available >= 4


async def test_an_edit_in_the_middle_begins_with_its_own_first_stage() -> None:
    one = await shifting()
    await wait(one, 310)
    assert new_pods(one) == 2
    other = {"source": {"local": {"path": "another"}}}
    await one.apply(model=other)
    assert new_pods(one) == 1, "of the newest revision"
    assert one.controller.fewest_available == 4
    for _ in range(3):
        await wait(one, 310)
    assert one.operator.condition("Ready")["status"] == "True"


async def test_back_to_the_old_spec_is_no_shift() -> None:
    one = await shifting()
    await wait(one, 310)
    await one.apply(quantization=None, model=manifest()["spec"]["model"])
    assert (new_pods(one), held(one)) == (4, False)
    assert one.controller.fewest_available == 4


@pytest.mark.parametrize(
    "edit",
    [{"rollout": {"strategy": "ResourceAware"}}, {"replicas": 1}, {"quantization": None}],
    ids=["ResourceAware", "one replica", "no gate"],
)
async def test_where_the_gate_alone_decides_the_shift_ends_and_the_rollout_goes_on(edit: Manifest) -> None:
    one = await shifting()
    await one.apply(**edit)
    assert not held(one)
    assert one.operator.condition("Ready")["status"] == "True"
    assert new_pods(one) == len(one.controller.pods())


@pytest.mark.parametrize(
    ("replicas", "spec", "change"),
    [
        (1, {}, JUDGED),
        (4, {"rollout": {"strategy": "ResourceAware"}}, JUDGED),
        (4, {}, {"model": JUDGED["model"]}),
        (4, {}, {"quantization": JUDGED["quantization"]}),
        (4, {"quantization": {"qualityGate": GATE | {"base": {"local": {"path": "demo-chat"}}}}}, image("better")),
    ],
    ids=["one replica", "ResourceAware", "no gate", "only the gate", "the same model in another image"],
)
async def test_there_is_no_staged_shift(replicas: int, spec: Manifest, change: Manifest) -> None:
    one = await serving(replicas, **spec)
    seen: list[bool] = []
    respec(one.cluster, **change)
    await one.settle(lambda world: seen.append(held(world)))
    assert not any(seen)
    assert one.operator.condition("Ready")["status"] == "True"
    assert "TrafficShiftStarted" not in one.decisions


async def test_the_first_revision_of_all_is_no_shift() -> None:
    one = World(world(manifest(replicas=4, **JUDGED)))
    await one.settle()
    assert one.operator.condition("Ready")["status"] == "True"
    assert not held(one)


async def test_a_rollout_that_an_older_operator_began_goes_on_as_it_was() -> None:
    """An upgrade adds no stage to a rollout that is under way."""
    one = await shifting()

    def as_before(live: Manifest) -> None:
        live["spec"].pop("minReadySeconds")
        live["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] = 0

    one.cluster.edit(DEPLOYMENT, "demo", as_before)
    one.restart()
    await one.settle()
    assert not held(one)
    assert one.operator.condition("Ready")["status"] == "True"


async def test_a_pod_that_never_gets_ready_is_late_though_the_deployment_has_no_deadline() -> None:
    one = await serving(rollout={"strategy": "Availability"})
    one.controller.failing["slow"] = {"containerStatuses": [{"name": "runtime", "state": {"running": {}}}]}
    respec(one.cluster, **JUDGED, **image("slow"))
    await one.settle()
    for pod in one.controller.pods():
        one.cluster.edit(
            POD, pod["metadata"]["name"], lambda live: live["metadata"].update(creationTimestamp=one.operator.now)
        )
    await one.operator.ask_pods(1700)  # of the deadline of 30 minutes
    await one.settle()
    assert one.status["rollout"]["phase"] == "Progressing"
    await one.operator.ask_pods(200)
    await one.settle()
    assert one.status["rollout"]["phase"] == "Stopped"
    assert "RolloutStopped" in one.decisions
    assert (held(one), one.controller.fewest_available) == (True, 4)


async def test_what_serves_counts_as_available_while_the_rollout_is_held() -> None:
    one = await shifting()
    await wait(one, 310)
    deployment = one.cluster.the(DEPLOYMENT)
    assert deployment["status"]["availableReplicas"] == 3, "the controller's own count: the old pods"
    assert (one.status["availableReplicas"], one.status["readyReplicas"]) == (5, 5)
    assert one.status["rollout"]["availableReplicas"] == 2
    assert deployment["spec"]["progressDeadlineSeconds"] > deployment["spec"]["minReadySeconds"], (
        "the API server's rule"
    )


def scale_by_hand(live: Manifest) -> None:
    live["spec"]["replicas"] = 2


def scaled_by_hand_of_an_older_operator(live: Manifest) -> None:
    scale_by_hand(live)
    live["metadata"].get("annotations", {}).clear()


def hold_at_ten(live: Manifest) -> None:
    live["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] = 9


@pytest.mark.parametrize("edit", [scale_by_hand, scaled_by_hand_of_an_older_operator, hold_at_ten])
async def test_somebody_else_edits_the_deployment_in_the_middle_and_the_rollout_goes_on(edit: Any) -> None:
    one = await shifting(8)
    await wait(one, 310)
    await wait(one, 310)
    assert new_pods(one) == 4
    one.cluster.edit(DEPLOYMENT, "demo", edit)
    await one.settle()
    deployment = one.cluster.the(DEPLOYMENT)["spec"]
    assert deployment["replicas"] == 8
    if edit is scale_by_hand:
        assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 3, "no larger share than before"
        assert new_pods(one) == 4
    for _ in range(3):
        await wait(one, 310)
    assert one.operator.condition("Ready")["status"] == "True"
    assert not held(one)
