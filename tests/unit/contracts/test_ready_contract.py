"""The bytes of the real server's `/ready` are what the operator reads: the contract, held from both ends."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from millstream_operator.kube.kinds import DEPLOYMENT, POD
from millstream_operator.probing.boot_report import MEMORY_KEYS, RUNTIME_PHASES, UNRESPONSIVE, read_boot_report
from millstream_runtime.boot import BOOT_PHASES, Phase
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine_process import boot_events
from millstream_runtime.engine_process.loop import EngineLike, OnPhase, load_engine
from tests.support.fake_cluster import pod_of
from tests.support.fake_operator import FakeOperator, world
from tests.support.server_thread import ServerThread, serving, wait_for
from tests.support.tiny_model import write_tiny_model

RUNNING = {"running": {"startedAt": "2025-01-01T00:00:00Z"}}
Manifest = dict[str, Any]


def ready_bytes(server: ServerThread) -> Manifest:
    body = json.loads(server.get("/ready").content)
    assert isinstance(body, dict)
    return body


def test_both_ends_mean_the_same_words() -> None:
    assert tuple(phase.value for phase in BOOT_PHASES) == RUNTIME_PHASES
    assert Phase.UNRESPONSIVE.value == UNRESPONSIVE


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, Manifest]:
    """`/ready` in the middle of the real engine's own load, and after it."""
    half, whole = threading.Event(), threading.Event()

    class Held(boot_events.BootEvents):
        def weights_read(self, done_bytes: int, total_bytes: int) -> None:
            super().weights_read(done_bytes, total_bytes)
            if done_bytes >= total_bytes // 2 and not half.is_set():
                half.set()
                assert whole.wait(120)

    def load(config: RuntimeConfig, on_phase: OnPhase) -> EngineLike:
        return load_engine(config, Held(on_phase._send))

    model = write_tiny_model(tmp_path_factory.mktemp("ready") / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boot_events, "REPORT_INTERVAL_SECONDS", 0.0)
        with serving(model, make_engine=load) as server:
            assert half.wait(120)
            wait_for(lambda: "eta_seconds" in ready_bytes(server), "an estimate")
            loading = ready_bytes(server)
            whole.set()
            server.wait_ready()
            return loading, ready_bytes(server)


def test_a_boot_under_way_is_read_with_its_progress(answers: tuple[Manifest, Manifest]) -> None:
    loading, _ = answers
    report = read_boot_report(loading)
    assert report is not None
    assert report.phase == "LoadingWeights"
    assert report.done_bytes == loading["progress"]["done_bytes"] > 0
    assert report.done_bytes < loading["progress"]["total_bytes"]
    assert report.eta_seconds == loading["eta_seconds"]
    assert set(report.seconds) == {"Starting", "LoadingWeights"}
    assert report.memory == {}, "nothing is measured yet"


def test_a_boot_that_is_done_is_read_with_every_figure(answers: tuple[Manifest, Manifest]) -> None:
    _, ready = answers
    report = read_boot_report(ready)
    assert report is not None
    assert report.phase == "Ready"
    assert report.eta_seconds is None
    assert set(report.seconds) == set(RUNTIME_PHASES)
    assert dict(report.memory) == ready["memory"], "the operator reads every figure that is reported"
    assert set(ready["memory"]) == {*MEMORY_KEYS} - {"draft_kv_cache_bytes"}, "there is no draft"


async def test_a_boot_under_way_reaches_the_status(answers: tuple[Manifest, Manifest]) -> None:
    loading, _ = answers
    operator = FakeOperator(world())
    await operator.turn()
    template = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    operator.cluster.put(pod_of("demo-0", template, ready=False))
    scheduled = [{"type": "Ready", "status": "False"}, {"type": "PodScheduled", "status": "True"}]
    container = {"containerStatuses": [{"name": "runtime", "state": RUNNING}]}
    operator.cluster.set_status(POD, "demo-0", {"conditions": scheduled} | container)
    operator.pods.reports["demo-0"] = loading
    await operator.turn()
    await operator.ask_pods()
    await operator.turn()
    assert operator.status()["warmup"]["phase"] == "LoadingWeights"
    assert operator.status()["warmup"]["estimatedReadyTime"]
    assert "measured" not in operator.status().get("memory", {})


async def test_what_was_measured_reaches_the_status(answers: tuple[Manifest, Manifest]) -> None:
    _, ready = answers
    operator = FakeOperator(world())
    operator.model.ready = {key: value for key, value in ready.items() if key not in ("config_hash", "model")}
    await operator.settle()
    assert operator.status()["memory"]["measured"] == {
        "weightsBytes": ready["memory"]["weights_bytes"],
        "activationsBytes": ready["memory"]["activations_bytes"],
        "graphsBytes": 0,
        "kvCacheBytes": ready["memory"]["kv_cache_bytes"],
        "kvCacheTokens": ready["memory"]["kv_cache_tokens"],
    }
