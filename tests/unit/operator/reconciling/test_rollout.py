"""Rollouts against a fake cluster that moves pods as Kubernetes does: by a surge, in place, and back again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_operator.planning.rollout_strategy import rollout_strategy
from millstream_operator.reconciling.kinds import CONFIG_MAP, CONTROLLER_REVISION, DEPLOYMENT, LLM_DEPLOYMENT, POD
from tests.support.fake_cluster import FakeCluster, Fault, Killed
from tests.support.fake_operator import FakeOperator, answer_to, respec, world
from tests.support.llmdeployments import deployment, manifest
from tests.support.rollout_controller import RolloutController, ended

Manifest = dict[str, Any]
NO_FOLDER = json.dumps({"reason": "CheckpointInvalid", "message": "The model folder /models/x does not exist."})
CRASHED = ended("Segmentation fault", restarts=3, code=139)
FAILING = {"bad": ended(NO_FOLDER), "crashing": CRASHED}
GPU = {"type": "GPU"}


def image(name: str) -> dict[str, Any]:
    return {"runtime": {"image": name}}


class World:
    """An operator and the controllers around it, turned by hand until nothing moves."""

    def __init__(self, cluster: FakeCluster, fault: Fault | None = None, gpus: int | None = None) -> None:
        self.cluster = cluster
        self.operator = FakeOperator(cluster, fault=fault)
        self.controller = RolloutController(cluster, failing=FAILING, gpus=gpus)

    async def settle(self, seen: Callable[[World], None] = lambda _: None) -> None:
        for _ in range(60):
            before, retries = self.cluster.version, len(self.operator.retries)
            await self.operator.turn()
            seen(self)
            self.controller.step()
            self.cluster.run_jobs(answer_to)
            seen(self)
            self.cluster.collect_garbage()
            if (self.cluster.version, len(self.operator.retries)) == (before, retries):
                return
        raise AssertionError(f"does not settle: {self.operator.client.written[-10:]}")

    async def apply(self, **spec: Any) -> None:
        respec(self.cluster, **spec)
        await self.settle()

    @property
    def status(self) -> Manifest:
        found: Manifest = self.cluster.the(LLM_DEPLOYMENT)["status"]
        return found

    @property
    def decisions(self) -> list[str]:
        """Newest first."""
        return [entry["type"] for entry in self.status["decisions"]]

    def images(self) -> list[str]:
        return [pod["spec"]["containers"][0]["image"] for pod in self.controller.available()]

    def restarts(self) -> dict[str, str]:
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self.controller.pods()}


async def served(strategy: str | None = None, *, replicas: int = 1, gpus: int | None = None, **spec: Any) -> World:
    """A world in which image `good` serves."""
    rollout: dict[str, Any] = {"rollout": {"strategy": strategy}} if strategy else {}
    found = World(world(manifest(replicas=replicas, **image("good"), **rollout, **spec)), gpus=gpus)
    await found.settle()
    assert found.operator.condition("Ready")["status"] == "True"
    found.controller.most_pods, found.controller.fewest_available = 0, 1 << 10
    found.controller.made.clear()
    found.operator.client.requests.clear()
    return found


# Which strategy


@pytest.mark.parametrize(
    ("asked", "gpus", "spare", "strategy"),
    [
        ("Availability", 1, False, "Availability"),
        ("ResourceAware", 0, True, "ResourceAware"),
        ("Auto", 0, False, "Availability"),
        ("Auto", 1, True, "Availability"),
        ("Auto", 1, False, "ResourceAware"),
        ("Auto", 1, None, "Availability"),
        (None, 4, False, "ResourceAware"),
    ],
)
def test_the_strategy_follows_spec_plan_and_spare_gpus(
    asked: str | None, gpus: int, spare: bool | None, strategy: str
) -> None:
    owner = deployment(rollout={"strategy": asked} if asked else {})
    assert rollout_strategy(owner, {"gpusPerReplica": gpus}, spare).value == strategy


# Availability


@pytest.mark.parametrize("replicas", [1, 3])
async def test_availability_never_takes_a_pod_before_its_successor_answers(replicas: int) -> None:
    one = await served("Availability", replicas=replicas)
    await one.apply(**image("better"))
    assert one.images() == ["better"] * replicas
    assert (one.controller.fewest_available, one.controller.most_pods) == (replicas, replicas + 1)
    assert one.status["rollout"]["strategy"] == "Availability"
    assert one.status["rollout"]["phase"] == "Complete"
    assert one.decisions == []


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("bad", ["bad", "crashing"])
async def test_a_failing_revision_stops_at_one_pod_and_the_old_ones_serve_on(bad: str, replicas: int) -> None:
    one = await served("Availability", replicas=replicas)
    await one.apply(**image(bad))
    assert one.images() == ["good"] * replicas
    assert len(one.controller.made) == 1, "one pod of the new revision was ever made"
    assert one.decisions == ["RolloutStopped"]
    assert one.status["rollout"]["phase"] == "Stopped"
    told = one.status["decisions"][0]["message"]
    assert ("/models/x does not exist" in told) == (bad == "bad"), "the runtime's own last error"
    assert one.operator.condition("Available")["status"] == "True"
    assert one.operator.condition("Ready")["reason"] == ("CheckpointInvalid" if bad == "bad" else "RuntimeCrashed")
    for _ in range(5):
        await one.operator.turn()
    assert one.decisions == ["RolloutStopped"], "told once"


async def test_back_to_the_old_spec_restarts_nothing_and_clears_the_failed_pod() -> None:
    one = await served("Availability")
    before = one.restarts()
    await one.apply(**image("bad"))
    await one.apply(**image("good"))
    assert one.restarts() == before
    assert one.operator.condition("Ready")["status"] == "True"
    assert one.status["rollout"]["phase"] == "Complete"


# In place


@pytest.mark.parametrize("replicas", [1, 3])
async def test_in_place_one_pod_is_missing_at_a_time_and_none_is_added(replicas: int) -> None:
    one = await served("ResourceAware", replicas=replicas)
    await one.apply(**image("better"))
    assert one.images() == ["better"] * replicas
    assert (one.controller.fewest_available, one.controller.most_pods) == (replicas - 1, replicas)
    assert one.status["rollout"] | {"currentRevision": "", "updateRevision": ""} == {
        "currentRevision": "",
        "updateRevision": "",
        "availableReplicas": replicas,
        "strategy": "ResourceAware",
        "phase": "Complete",
    }


async def test_in_place_is_told_before_the_first_pod_is_drained() -> None:
    one = await served("ResourceAware")
    respec(one.cluster, **image("better"))
    await one.operator.turn()
    kinds = [(request.kind, request.subresource) for request in one.operator.client.written]
    assert kinds.index(("LLMDeployment", "status")) < kinds.index(("Event", None)) < kinds.index(("Deployment", None))
    assert one.cluster.events[-2]["reason"] == "ReplacingInPlace"
    entry = one.status["decisions"][0]
    assert entry["type"] == "ReplacingInPlace"
    assert "spec.rollout.strategy is ResourceAware" in entry["message"]
    assert one.status["rollout"]["phase"] == "Progressing"
    assert "in place" in one.operator.condition("Ready")["message"]
    await one.settle()
    assert one.decisions == ["ReplacingInPlace"], "told once"


async def test_a_first_rollout_and_a_scale_drain_nobody_and_announce_nothing() -> None:
    one = await served("ResourceAware")
    await one.apply(replicas=3)
    assert one.images() == ["good"] * 3
    assert one.decisions == []


# Auto on GPUs


async def test_auto_tries_the_surge_and_replaces_in_place_when_it_finds_no_gpu() -> None:
    """The deadlock of KubeRay 4239 and KServe 5452: the new pod waits for a GPU that only the old one can give up."""
    one = await served(replicas=2, gpus=2, accelerator=GPU)
    await one.apply(**image("better"))
    assert one.images() == ["better"] * 2
    assert one.controller.most_pods == 3, "a surge was tried"
    assert one.controller.fewest_available == 1, "one at a time"
    assert one.decisions == ["ReplacingInPlace"]
    assert "no free GPU" in one.status["decisions"][0]["message"]
    assert one.operator.condition("Ready")["status"] == "True"


async def test_auto_does_not_turn_round_in_the_middle() -> None:
    """The drained pod's GPU is free for a moment: no reason to surge again."""
    one = await served(replicas=3, gpus=3, accelerator=GPU)
    seen: list[int] = []
    respec(one.cluster, **image("better"))
    await one.settle(lambda w: seen.append(w.cluster.the(DEPLOYMENT)["spec"]["strategy"]["rollingUpdate"]["maxSurge"]))
    assert sorted(seen, reverse=True) == seen, "from 1 to 0, and never back"
    assert one.images() == ["better"] * 3


async def test_auto_surges_where_a_gpu_is_spare() -> None:
    one = await served(replicas=2, gpus=3, accelerator=GPU)
    await one.apply(**image("better"))
    assert one.images() == ["better"] * 2
    assert one.controller.fewest_available == 2
    assert one.decisions == []


async def test_more_replicas_than_gpus_is_no_rollout_and_drains_nobody() -> None:
    one = await served(gpus=1, accelerator=GPU)
    before = one.restarts()
    await one.apply(replicas=2)
    assert before.items() <= one.restarts().items()
    assert one.operator.condition("Ready")["reason"] == "InsufficientGPU"
    assert one.decisions == []


async def test_availability_that_is_insisted_on_waits_for_a_gpu() -> None:
    one = await served("Availability", gpus=1, accelerator=GPU)
    await one.apply(**image("better"))
    assert one.images() == ["good"]
    ready = one.operator.condition("Ready")
    assert ready["reason"] == "InsufficientGPU"
    assert "rollout.strategy ResourceAware" in ready["message"], "and is told of the way out"


async def test_what_an_inventory_says_is_taken_and_kept_for_the_rollout() -> None:
    one = await served(replicas=2, accelerator=GPU)
    answers = iter([False, *[True] * 100])
    spare = one.operator.reconciler  # asked of the old revision, too, while the new image's model is inspected
    spare._spare = lambda owner, revision: revision.image == "good" or next(answers)  # what the app would give it
    await one.apply(**image("better"))
    assert one.controller.most_pods == 2
    assert one.decisions == ["ReplacingInPlace"]
    assert "no GPU is spare" in one.status["decisions"][0]["message"]


# Rolled back


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("bad", ["bad", "crashing"])
async def test_what_fails_in_place_is_rolled_back_by_itself(bad: str, replicas: int) -> None:
    one = await served("ResourceAware", replicas=replicas)
    current = one.status["rollout"]["currentRevision"]
    await one.apply(**image(bad))
    assert one.images() == ["good"] * replicas
    tried = one.cluster.all(CONTROLLER_REVISION)[-1]["metadata"]["labels"]["millstream.dev/revision"]
    assert len([digest for digest in one.controller.made if digest != one.controller.made[-1]]) == 1, tried
    assert one.decisions == ["RolledBack", "ReplacingInPlace"]
    assert one.status["rollout"]["phase"] == "RolledBack"
    assert one.status["rollout"]["currentRevision"] == current
    ready = one.operator.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "RolledBack")
    assert f"Rolled back to revision {current}" in ready["message"]
    assert ("/models/x does not exist" if bad == "bad" else "Segmentation fault") in ready["message"]
    for kind, status in {"Available": "True", "ModelReady": "True", "Stalled": "True"}.items():
        assert one.operator.condition(kind)["status"] == status
    assert [event["type"] for event in one.cluster.events if event["reason"] == "RolledBack"] == ["Warning"] * 2


async def test_a_failed_revision_is_not_tried_again_and_nothing_is_written() -> None:
    one = await served("ResourceAware")
    await one.apply(**image("bad"))
    one.controller.made.clear()
    one.operator.client.requests.clear()
    for _ in range(5):
        await one.settle()
    restarted = World(one.cluster)
    await restarted.settle()
    assert one.controller.made == restarted.controller.made == []
    assert one.operator.client.requests == restarted.operator.client.requests == []


async def test_scaling_and_repair_go_on_with_what_was_put_back() -> None:
    one = await served("ResourceAware")
    await one.apply(**image("bad"))
    one.cluster.remove(DEPLOYMENT, "demo")
    await one.apply(replicas=2)
    assert one.images() == ["good"] * 2
    assert one.operator.condition("Ready")["reason"] == "RolledBack"


async def test_the_old_spec_makes_it_ready_at_once_without_a_restart() -> None:
    one = await served("ResourceAware", replicas=2)
    await one.apply(**image("bad"))
    before = one.restarts()
    await one.apply(**image("good"))
    assert one.restarts() == before
    assert one.operator.condition("Ready")["status"] == "True"
    assert one.operator.condition("Stalled") == {}
    assert one.status["rollout"]["phase"] == "Complete"


async def test_the_old_spec_stays_as_it_was_rendered_even_for_a_newer_operator() -> None:
    one = await served("ResourceAware", engine={"maxNumSeqs": 4})
    await one.apply(**image("bad"))
    before = one.restarts()
    newer = World(one.cluster)
    newer.operator = FakeOperator(one.cluster, image="registry.example.com/runtime:2")
    await newer.apply(runtime={"image": "good"})
    assert newer.restarts() == before


async def test_a_new_spec_is_tried_and_so_is_the_failed_one_after_it() -> None:
    one = await served("ResourceAware")
    await one.apply(**image("bad"))
    await one.apply(**image("better"))
    assert one.images() == ["better"]
    assert one.operator.condition("Ready")["status"] == "True"
    one.controller.failing.clear()  # somebody put the model where it belongs
    await one.apply(**image("bad"))
    assert one.images() == ["bad"], "the spec asked for it anew"
    assert one.operator.condition("Ready")["status"] == "True"


async def test_a_second_failure_of_the_same_revision_is_told_again() -> None:
    one = await served("ResourceAware")
    await one.apply(**image("bad"))
    await one.apply(**image("good"))
    await one.apply(**image("bad"))
    assert one.images() == ["good"]
    assert one.decisions.count("RolledBack") == 2


async def test_what_may_pass_by_itself_is_given_up_at_the_deadline() -> None:
    one = await served("ResourceAware")
    one.controller.failing["slow"] = ended("", restarts=1)
    await one.apply(**image("slow"))
    assert one.images() == []
    assert one.decisions == ["ReplacingInPlace"], "one crash is no certainty"
    one.controller.let_the_deadline_pass()
    await one.settle()
    assert one.images() == ["good"]
    assert one.decisions[0] == "RolledBack"


async def test_an_image_that_does_not_exist_is_certain_and_a_registry_that_is_away_is_not() -> None:
    def pulling(detail: str) -> Manifest:
        waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "x": ErrImagePull: {detail}'}
        return {"containerStatuses": [{"name": "runtime", "restartCount": 0, "state": {"waiting": waiting}}]}

    one = await served("ResourceAware")
    one.controller.failing["denied-away"] = pulling("dial tcp: lookup registry: no such host")
    await one.apply(**image("denied-away"))
    assert one.images() == []
    one.controller.failing["unknown"] = pulling("failed to resolve reference: unknown: not found")
    await one.apply(**image("unknown"))
    assert one.images() == ["good"]
    assert "ImagePullFailed" in one.operator.condition("Ready")["message"]


async def test_a_revision_that_once_answered_is_not_given_up() -> None:
    one = await served("ResourceAware")
    await one.apply(**image("better"))
    one.controller.failing["better"] = CRASHED
    (pod,) = one.controller.pods()
    one.cluster.remove(POD, pod["metadata"]["name"])
    await one.settle()
    assert one.images() == []
    assert one.operator.condition("Ready")["reason"] == "RuntimeCrashed"
    assert "RolledBack" not in one.decisions


async def test_a_first_revision_that_fails_has_nothing_to_go_back_to() -> None:
    one = World(world(manifest(**image("bad"), rollout={"strategy": "ResourceAware"})))
    await one.settle()
    assert one.operator.condition("Ready")["reason"] == "CheckpointInvalid"
    assert one.decisions == []


async def test_a_stuck_surge_is_rolled_back_rather_than_made_room_for() -> None:
    """Who turns to ResourceAware because the new pod does not come up must not lose the old one to it."""
    one = await served("Availability")
    before = one.restarts()
    await one.apply(**image("bad"))
    await one.apply(rollout={"strategy": "ResourceAware"})
    assert one.restarts() == before
    assert one.operator.condition("Ready")["reason"] == "RolledBack"


async def test_a_refused_spec_does_not_keep_a_failed_one_from_being_rolled_back() -> None:
    one = await served("ResourceAware")
    one.controller.failing["slow"] = ended("", restarts=0)
    await one.apply(**image("slow"))
    await one.apply(speculation={"method": "NGram"})
    one.controller.failing["slow"] = CRASHED
    (pod,) = one.controller.pods()
    one.cluster.set_status(POD, pod["metadata"]["name"], pod["status"] | CRASHED)
    await one.settle()
    assert one.images() == ["good"]


# Configuration of what runs


async def test_the_configuration_of_pods_that_serve_is_kept_and_repaired_while_newer_ones_come_and_go() -> None:
    one = await served("Availability")
    (serving,) = [config for config in one.cluster.all(CONFIG_MAP) if config.get("immutable")]
    for sequences in range(1, 9):
        await one.apply(engine={"maxNumSeqs": sequences}, **image("bad"))
    name = serving["metadata"]["name"]
    assert one.cluster.get(CONFIG_MAP, name) is not None
    one.cluster.remove(CONFIG_MAP, name)
    await one.settle()
    assert one.cluster.the(CONFIG_MAP, name)["data"] == serving["data"]
    await one.apply(engine=None, **image("good"))
    assert one.operator.condition("Ready")["status"] == "True", "its record is kept as well"
    boots = [config for config in one.cluster.all(CONFIG_MAP) if config.get("immutable")]
    assert len(boots) <= 4


async def test_a_heartbeat_or_a_log_level_reaches_the_file_and_no_pod() -> None:
    one = await served()
    before, template = one.restarts(), one.cluster.the(DEPLOYMENT)
    await one.apply(warmup={"heartbeatInterval": "5s"}, runtime={"image": "good", "logLevel": "Debug"})
    live = json.loads(one.cluster.the(CONFIG_MAP, "demo-live")["data"]["live.json"])
    assert live == {"heartbeat_interval_seconds": 5, "log_level": "debug"}
    assert (one.restarts(), one.cluster.the(DEPLOYMENT)) == (before, template)
    assert one.operator.condition("Ready")["observedGeneration"] == 2
    assert [kind for _, kind in one.operator.writes] == ["ConfigMap", "LLMDeployment/status"]


# Records of before the configuration was parted


def of_format_1(cluster: FakeCluster) -> FakeCluster:
    """The world as the version before would have left it: flags in the pod, no ConfigMaps, no marks."""
    (record,) = cluster.all(CONTROLLER_REVISION)
    older_digest = "0000000001"
    flags = ["serve", "--model=/models/demo-chat", "--served-model-name=demo", "--heartbeat-interval-seconds=45"]

    def without_files(template: Manifest) -> None:
        template["metadata"]["labels"]["millstream.dev/revision"] = older_digest
        spec = template["spec"]
        spec["containers"][0]["args"] = flags
        spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "config"]
        mounts = spec["containers"][0]["volumeMounts"]
        spec["containers"][0]["volumeMounts"] = [mount for mount in mounts if mount["name"] != "config"]

    older = copy.deepcopy(record)
    cluster.remove(CONTROLLER_REVISION, record["metadata"]["name"])
    older["metadata"]["name"] = "demo-0000000002"
    older["metadata"]["labels"]["millstream.dev/revision"] = older_digest
    older["metadata"]["annotations"] = {}
    older["data"] = {**older["data"], "format": 1}
    del older["data"]["boot"]
    without_files(older["data"]["template"])
    cluster.put(older)
    cluster.edit(DEPLOYMENT, "demo", lambda live: without_files(live["spec"]["template"]))
    for pod in cluster.all(POD):
        cluster.edit(POD, pod["metadata"]["name"], without_files)
    for config in cluster.all(CONFIG_MAP):
        cluster.remove(CONFIG_MAP, config["metadata"]["name"])
    return cluster


async def test_an_upgrade_restarts_no_pod_of_an_older_record() -> None:
    one = await served(warmup={"timeout": "10m"})
    of_format_1(one.cluster)
    template = one.cluster.the(DEPLOYMENT)["spec"]["template"]
    upgraded = World(one.cluster)
    await upgraded.settle()
    assert one.cluster.the(DEPLOYMENT)["spec"]["template"] == template
    assert upgraded.controller.made == []
    assert one.cluster.all(CONFIG_MAP) == []
    upgraded.operator.client.requests.clear()
    await upgraded.settle()
    assert upgraded.operator.client.requests == []


@pytest.mark.parametrize(
    "change", [{"warmup": {"heartbeatInterval": "5s"}}, {"runtime": {"image": "good", "logLevel": "Debug"}}]
)
async def test_what_a_pod_of_an_older_record_cannot_be_told_while_it_runs_replaces_it(change: Manifest) -> None:
    """Not ignored: its flags say it, so another value is another pod, with files this time."""
    one = await served()
    of_format_1(one.cluster)
    await one.apply(**change)
    assert len(one.controller.made) == 1
    assert one.cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]["containers"][0]["args"][1].startswith("--config=")
    assert one.operator.condition("Ready")["status"] == "True"


# Killed, and any order of changes

# strategy, image, replicas: the more, the more half-way states, and the longer it takes
STORIES = {
    "rollout": ("Availability", "better", 1),
    "in place": ("ResourceAware", "better", 2),
    "stopped": ("Availability", "bad", 1),
    "rolled back": ("ResourceAware", "bad", 2),
}
UNDISTURBED: dict[str, tuple[FakeCluster, dict[Any, Manifest], int]] = {}


async def undisturbed(story: str) -> tuple[FakeCluster, dict[Any, Manifest], int]:
    """A copy of the world in which the story begins, its end without a fault, and how many writes that took."""
    if story not in UNDISTURBED:
        strategy, target, replicas = STORIES[story]
        begun = await served(strategy, replicas=replicas)
        quiet = World(copy.deepcopy(begun.cluster))
        await quiet.apply(**image(target))
        UNDISTURBED[story] = (begun.cluster, comparable(quiet.cluster), len(quiet.operator.client.written))
    begun_cluster, wanted, writes = UNDISTURBED[story]
    return copy.deepcopy(begun_cluster), wanted, writes


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("story", STORIES)
async def test_killed_at_any_write_of_a_rollout_a_new_process_ends_where_no_fault_would(
    story: str, after: bool
) -> None:
    _, wanted, writes = await undisturbed(story)
    assert writes >= 5
    for at in range(writes):
        begun, _, _ = await undisturbed(story)
        killed = World(begun, Fault(at, Killed(), after=after))
        with pytest.raises(Killed):
            await killed.apply(**image(STORIES[story][1]))
        restarted = World(killed.cluster)
        await restarted.settle()
        assert comparable(restarted.cluster) == wanted, f"killed at write {at}"


def comparable(cluster: FakeCluster) -> dict[Any, Manifest]:
    """Without the names of pods, which count how many there were before."""
    found = cluster.snapshot()
    pods = [(live["metadata"]["labels"], live["status"]) for key, live in found.items() if key[0] == "Pod"]
    rest: dict[Any, Any] = {key: live for key, live in found.items() if key[0] != "Pod"}
    return rest | {"pods": sorted(pods, key=str)}


IMAGES = st.sampled_from(["good", "better", "bad", "crashing"])
STRATEGIES = st.sampled_from(["Auto", "Availability", "ResourceAware"])


@settings(max_examples=12, deadline=None)
@given(changes=st.lists(st.tuples(IMAGES, STRATEGIES, st.integers(1, 3)), min_size=1, max_size=4))
async def test_whatever_was_tried_in_between_the_end_is_that_of_a_fresh_create(
    changes: list[tuple[str, str, int]],
) -> None:
    one = await served("Auto", replicas=2)
    for target, strategy, replicas in changes:
        await one.apply(**image(target), rollout={"strategy": strategy}, replicas=replicas)
        assert len(one.images()) >= min(replicas, 1), "something serves after every change"
    await one.apply(**image("good"), rollout={"strategy": "Auto"}, replicas=2)
    fresh = await served("Auto", replicas=2)
    assert what_matters(one) == what_matters(fresh)


def what_matters(one: World) -> Manifest:
    """Everything but the history: older records and their configuration, the journal, transition times."""
    found = one.cluster.snapshot()
    running = one.cluster.the(DEPLOYMENT)["spec"]["template"]["metadata"]["labels"]["millstream.dev/revision"]
    kept: dict[Any, Any] = {}
    for (kind, _, name), live in found.items():
        is_record = kind == CONTROLLER_REVISION.kind
        if is_record and live["metadata"]["labels"]["millstream.dev/revision"] != running:
            continue
        if kind == CONFIG_MAP.kind and live.get("immutable"):
            continue  # the same engine all the time: one configuration
        live.pop("revision", None)
        live["metadata"].get("annotations", {}).pop("millstream.dev/applied", None)
        if kind == LLM_DEPLOYMENT.kind:
            live["status"].pop("decisions")
            for condition in live["status"]["conditions"]:
                condition.pop("observedGeneration")
            live["status"].pop("observedGeneration")
        if kind == DEPLOYMENT.kind:
            live["status"].pop("conditions", None)
        kept[kind, "" if kind == POD.kind else name] = live if kind != POD.kind else live["status"]
    return kept
