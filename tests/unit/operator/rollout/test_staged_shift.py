"""Traffic shifts in stages to a model that passed its gate; worse pods go back, and no replica is ever missed."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, POD
from millstream_operator.rendering.deployment import HELD_MIN_READY_SECONDS
from millstream_operator.rendering.revision import Revision
from millstream_operator.rollout.traffic_shift.staged_shift import limits_of
from millstream_operator.rollout.traffic_shift.traffic_judgement import Limits
from tests.support.fake_operator import respec, world
from tests.support.llmdeployments import deployment, manifest
from tests.support.prepared_models import GATE, JUDGED
from tests.support.rollout_world import World, image

Manifest = dict[str, Any]


FIVE_MINUTES = {"evidenceTimeout": "5m"}


async def serving(replicas: int = 4, **spec: Any) -> World:
    """A world in which the old model serves, and whose pods can be read. A stage waits five minutes for evidence."""
    spec = {"rollout": FIVE_MINUTES} | spec
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


def answer(one: World, *, new: bool, stop: int = 0, error: int = 0, token_seconds: float = 0.03) -> None:
    """The pods' counters from now on, each the same."""
    buckets = ((bound, stop if token_seconds <= float(bound) else 0) for bound in ("0.025", "0.05", "0.1", "+Inf"))
    times = "vllm:request_time_per_output_token_seconds"
    text = "".join(f'{times}_bucket{{le="{bound}",model_name="demo"}} {count}.0\n' for bound, count in buckets)
    text += f"{times}_sum{{}} {stop * token_seconds}\n"
    for reason, count in (("stop", stop), ("length", 0), ("error", error), ("abort", 3)):
        text += f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="demo"}} {count}.0\n'
    for pod in pods_of(one, new=new):
        one.operator.pods.expositions[pod["metadata"]["name"]] = text


async def begin_counting(one: World) -> None:
    """The first look of a stage: what the pods answered before says nothing."""
    answer(one, new=True, stop=100)
    answer(one, new=False, stop=5000)
    await wait(one, 11)


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
    assert "stage 2 of 4 goes on without enough evidence with 2 of 8 replicas" in messages[1]
    assert "no request ended in its pods that could be read, so nothing was compared" in messages[1]
    assert "After 5m it still lacks more requests, to tell its errors" in messages[1]
    assert one.operator.condition("InsufficientEvidence") == {}, "the journal keeps it"


async def test_a_stage_that_proceeds_without_evidence_says_so() -> None:
    one = await shifting(8)
    assert one.operator.condition("InsufficientEvidence") == {}
    await wait(one, 310)
    await wait(one, 11)
    condition = one.operator.condition("InsufficientEvidence")
    assert condition["reason"] == "ProceededWithoutEvidence"
    assert "within 5m: one pod." in condition["message"]
    assert "stage 2 of 4 (2 of 8 replicas): 0 of about 300 requests" in one.status["rollout"]["evidence"]


async def test_a_stage_is_held_until_it_has_its_evidence_where_the_spec_says_so() -> None:
    one = await shifting(4, rollout=FIVE_MINUTES | {"onInsufficientEvidence": "Hold"})
    for _ in range(3):
        await wait(one, 3000)
    assert (new_pods(one), len(one.controller.available())) == (1, 5)
    condition = one.operator.condition("InsufficientEvidence")
    assert condition["reason"] == "WaitingForEvidence"
    assert (
        "After 5m, stage 1 of 3 (1 of 4 replicas) still waits for more requests, to tell its errors"
        in (condition["message"])
    )
    one.restart()
    await one.settle()
    assert new_pods(one) == 1, "another process waits on"
    await begin_counting(one)
    answer(one, new=True, stop=400)
    answer(one, new=False, stop=6000)
    await wait(one, 11)
    assert new_pods(one) == 2, "with the evidence it goes on by itself"
    assert one.operator.condition("InsufficientEvidence") == {}
    await one.apply(rollout=FIVE_MINUTES)
    await wait(one, 11)
    await wait(one, 310)
    assert new_pods(one) == 4, "Proceed ends the wait"


async def test_a_busy_model_moves_on_after_enough_requests() -> None:
    one = await shifting()
    await begin_counting(one)
    answer(one, new=True, stop=300)
    answer(one, new=False, stop=5500)
    await wait(one, 11)
    assert new_pods(one) == 1, "200 requests since the shift began: about 300 are needed where none fails"
    assert one.status["rollout"]["evidence"] == (
        "stage 1 of 3 (1 of 4 replicas): 200 of about 300 requests; it waits for more requests, to tell its errors"
    )
    answer(one, new=True, stop=350)
    answer(one, new=False, stop=5600)
    await wait(one, 11)
    assert new_pods(one) == 2
    (entry,) = [one["message"] for one in one.status["decisions"] if one["type"] == "TrafficShifted"]
    assert "errors in 0 of 250 of its requests, in 0 of 2400 of the old pods', mean time per token 30 ms" in entry
    assert "stage 2 of 3 (2 of 4 replicas)" in one.operator.condition("Ready")["message"]


async def test_while_no_request_ends_nothing_is_written() -> None:
    one = await shifting()
    answer(one, new=True, stop=1)
    answer(one, new=False, stop=500)
    for _ in range(2):
        await wait(one, 11)
    one.operator.client.requests.clear()
    for _ in range(5):
        await wait(one, 11)
    assert one.operator.writes == []
    answer(one, new=True, stop=2)
    await wait(one, 11)
    assert [kind for _, kind in one.operator.writes] == ["ControllerRevision", "LLMDeployment/status"], "what changed"


@pytest.mark.parametrize("stage", [1, 2, 3])
async def test_worse_pods_are_taken_back_and_no_replica_is_missed(stage: int) -> None:
    one = await shifting()
    for _ in range(stage - 1):
        await wait(one, 310)
    await wait(one, 11)
    await begin_counting(one)
    answer(one, new=False, stop=5500)
    answer(one, new=True, stop=110, error=10)
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
    await one.apply(rollout={"retry": "again"})
    assert new_pods(one) == 1, "another value of retry begins the shift anew, with its first stage"


async def restart_container(one: World, count: int) -> None:
    name = pods_of(one, new=True)[0]["metadata"]["name"]
    crashed = {"containerStatuses": [{"name": "runtime", "restartCount": count, "state": {"running": {}}}]}
    ready = [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}]
    one.cluster.set_status(POD, name, crashed | {"conditions": ready})
    await wait(one, 11)


async def test_one_restart_is_no_verdict_and_many_are() -> None:
    one = await shifting()
    await wait(one, 11)
    for count in range(1, 4):
        await restart_container(one, count)
        assert "RolledBack" not in one.decisions
    for count in range(4, 9):
        if "RolledBack" not in one.decisions:
            await restart_container(one, count)
    assert one.decisions[0] == "RolledBack"
    assert "began anew" in one.operator.condition("Ready")["message"]


async def test_errors_of_requests_that_end_with_their_engine_are_one_event() -> None:
    one = await shifting()
    await begin_counting(one)
    answer(one, new=True, stop=150, error=40)
    answer(one, new=False, stop=5100)
    name = pods_of(one, new=True)[0]["metadata"]["name"]
    one.operator.pods.expositions[name] += "millstream_engine_restarts_total{} 1.0\n"
    await wait(one, 11)
    assert "RolledBack" not in one.decisions


async def test_slower_pods_are_taken_back() -> None:
    one = await shifting()
    for count in (0, 400):
        answer(one, new=True, stop=count, token_seconds=0.08)
        answer(one, new=False, stop=count)
        await wait(one, 11)
    assert one.decisions[0] == "RolledBack", one.status
    message = one.operator.condition("Ready")["message"]
    assert "its time per token is 80 ms, that of the old pods 30 ms; the limit is 2 times" in message


async def test_evidence_survives_an_operator_that_ends_after_every_turn() -> None:
    one = await shifting()
    for look in range(1, 30):
        answer(one, new=True, stop=100 * look, error=4 * look)
        answer(one, new=False, stop=500 * look, error=5 * look)
        one.restart()
        for pods, is_new in ((100, True), (500, False)):
            answer(one, new=is_new, stop=pods * look, error=(4 if is_new else 5) * look)
        one.operator.seconds += 11
        await one.operator.turn()
        one.controller.step()
        if "RolledBack" in one.decisions:
            break
    assert one.decisions[0] == "RolledBack", "3.8 % over 1 %: no single look shows it"
    assert look > 3
    await one.settle()
    assert one.controller.fewest_available == 4


async def test_old_pods_that_die_and_come_again_are_no_evidence() -> None:
    one = await shifting()
    await begin_counting(one)
    gone = pods_of(one, new=False)[0]["metadata"]["name"]
    one.cluster.remove(POD, gone)
    await one.settle()
    answer(one, new=True, stop=200)
    answer(one, new=False, stop=10)
    await wait(one, 11)
    answer(one, new=True, stop=400)
    answer(one, new=False, stop=200)
    await wait(one, 11)
    assert "RolledBack" not in one.decisions
    assert new_pods(one) == 2


async def test_a_jump_of_the_wall_clock_ends_no_stage() -> None:
    one = await shifting()
    await wait(one, 11)
    for now in ("2031-01-01T00:00:00Z", "2019-01-01T00:00:00Z"):
        one.operator.now = now
        await wait(one, 11)
        assert new_pods(one) == 1


async def test_an_autoscaler_that_never_rests_does_not_begin_a_stage_anew() -> None:
    one = await shifting(4)
    answered = 0
    for turn in range(14):
        answered += 50
        answer(one, new=True, stop=answered)
        answer(one, new=False, stop=5 * answered)
        await wait(one, 11)
        await one.apply(replicas=8 if turn % 2 == 0 else 4)
    assert one.decisions.count("TrafficShifted") >= 1
    assert "RolledBack" not in one.decisions


async def test_another_process_of_the_operator_goes_on_from_the_same_stage() -> None:
    one = await shifting(8)
    await wait(one, 310)
    await wait(one, 310)
    assert new_pods(one) == 4
    one.restart()
    await one.settle()
    assert {kind for _, kind in one.operator.writes} <= {"ControllerRevision", "LLMDeployment/status"}, "no pod"
    await wait(one, 290)
    assert new_pods(one) == 4, "the time of the stage goes on"
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


@pytest.mark.parametrize(
    ("new", "old", "factor"),
    [
        ({}, {}, 2.0),
        ({"predicted": {"itlMicroseconds": 30}}, {"predicted": {"itlMicroseconds": 10}}, 6.0),
        ({"predicted": {"itlMicroseconds": 90}}, {"predicted": {"itlMicroseconds": 10}}, 8.0),
        ({"predicted": {"itlMicroseconds": 5}}, {"predicted": {"itlMicroseconds": 10}}, 2.0),
        ({"quantization": "INT8", "accelerator": "CPU"}, {"quantization": "None", "accelerator": "CPU"}, 8.0),
        ({"quantization": "INT8", "accelerator": "L4"}, {"quantization": "None", "accelerator": "L4"}, 2.0),
    ],
    ids=["the same", "three times", "nine times", "faster", "another format on a CPU", "and on a GPU"],
)
def test_the_limit_of_times_follows_what_the_plans_predict(new: Manifest, old: Manifest, factor: float) -> None:
    revisions = [revision_of(plan) for plan in (new, old)]
    assert limits_of(deployment(), *revisions) == Limits(factor=factor)
    promised = deployment(objectives={"itl": {"p95": "80ms"}})
    assert limits_of(promised, *revisions).objective_seconds == 0.08, "the objective wins"


def revision_of(plan: Manifest) -> Revision:
    return Revision("demo-1", "1", "2", "3", "image", plan, {})
