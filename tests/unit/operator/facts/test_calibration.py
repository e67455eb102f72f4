"""What a runtime measured corrects later plans, is written once, and changes nothing that runs."""

from __future__ import annotations

import json

import pytest

from millstream_operator.facts.calibration_record import MAX_ENTRIES, Entry, config_map, data_key, read_entries
from millstream_operator.kube.client import ApiError
from millstream_operator.kube.kinds import CONFIG_MAP, CONTROLLER_REVISION, LLM_DEPLOYMENT
from millstream_operator.planning.calibration import CalibrationKey, Correction
from tests.support.fake_cluster import Fault
from tests.support.fake_operator import FakeModel, FakeOperator, world
from tests.support.llmdeployments import manifest
from tests.support.measured_models import (
    MEASURED,
    NAME,
    SYSTEM,
    add,
    entries,
    gpu_world,
    measured,
    plan_of,
)


async def test_what_was_measured_is_kept_per_image_model_gpu_and_tensor_parallel_size() -> None:
    cluster = gpu_world()
    await measured(cluster)
    ((key, entry),) = entries(cluster).items()
    assert (key.image, key.accelerator, key.tensor, key.quantization) == (
        "registry.example.com/runtime:1",
        "L4-24GB",
        1,
        "None",
    )
    assert key.model.startswith("llama-")
    assert entry.correction.graphs_permille == 3301
    assert "team" not in json.dumps(cluster.get(CONFIG_MAP, NAME, SYSTEM)), "no tenant is named"


async def test_a_later_plan_is_corrected_and_says_what_was_predicted_and_measured() -> None:
    cluster = gpu_world()
    operator = await measured(cluster)
    add(cluster, "later")
    await operator.settle("later")
    before, after = plan_of(cluster, "demo"), plan_of(cluster, "later")
    assert "calibration" not in before
    assert before["memory"]["graphsBytes"] == 16 * (8 << 20)
    assert after["memory"]["graphsBytes"] == pytest.approx(MEASURED["graphs_bytes"], rel=0.001)
    assert after["memory"]["kvCacheBytes"] == pytest.approx(MEASURED["kv_cache_bytes"], rel=0.01)
    (used,) = after["calibration"]
    assert (used["accelerator"], used["tensorParallelSize"], used["graphsPermille"]) == ("L4-24GB", 1, 3301)
    (reason,) = [one["reason"] for one in after["reasons"] if "Corrected by" in one["reason"]]
    assert "on L4-24GB TP1" in reason
    assert "graphs 0.44 GB, predicted 0.13 GB (× 3.30)" in reason
    memory = operator.status("later")["memory"]
    assert memory["correction"]["graphsPermille"] == 3301
    assert memory["predicted"]["graphsBytes"] == after["memory"]["graphsBytes"]
    assert memory["measured"]["graphsBytes"] == MEASURED["graphs_bytes"]


@pytest.mark.parametrize("policy", ["Pinned", "FollowOperator"])
async def test_a_correction_changes_no_plan_that_runs(policy: str) -> None:
    cluster = gpu_world(runtime={"updatePolicy": policy})
    operator = await measured(cluster)
    records, version = cluster.all(CONTROLLER_REVISION), cluster.version
    # A correction under which the pinned plan would not fit any more.
    ((key, _),) = entries(cluster).items()
    huge = Correction(10_000, 10_000, 10_000, 10_000)
    cluster.put(config_map(SYSTEM, NAME, {key: Entry(key, huge, 9, at_seconds=1 << 40)}, cluster.version))
    for process in (operator, FakeOperator(cluster)):
        await process.calibration.load()
        assert process.facts.calibration.entries == ((key, huge),)
        process.facts.stamp += 1  # something else changed, so that every plan is compared again
        process.client.requests.clear()
        await process.settle()
        assert process.condition("PlanOutdated") == {}
        assert process.writes == []
    assert cluster.all(CONTROLLER_REVISION) == records
    assert int(cluster.version) == int(version) + 1


async def test_a_plan_that_was_corrected_is_compared_with_its_own_corrections() -> None:
    cluster = gpu_world()
    operator = await measured(cluster)
    add(cluster, "later", runtime={"updatePolicy": "FollowOperator"})
    await operator.settle("later")
    pinned = plan_of(cluster, "later")
    cluster.remove(CONFIG_MAP, NAME, SYSTEM)
    restarted = FakeOperator(cluster, model=operator.model)
    await restarted.calibration.load()
    restarted.facts.stamp += 1
    await restarted.settle("later")
    assert restarted.condition("PlanOutdated", "later") == {}
    assert plan_of(cluster, "later") == pinned
    cluster.edit(LLM_DEPLOYMENT, "later", lambda one: one["spec"].update(engine={"maxNumSeqs": 64}))
    await restarted.settle("later")
    assert "calibration" in plan_of(cluster, "later"), "its own pods were measured anew when the ConfigMap was gone"


async def test_a_steady_state_and_a_restart_write_nothing() -> None:
    cluster = gpu_world()
    operator = await measured(cluster)
    add(cluster, "later")
    operator.model.ready["memory"] = {**MEASURED, "graphs_bytes": 440_000_000}  # less than the threshold away
    await operator.settle("later")
    stored = cluster.get(CONFIG_MAP, NAME, SYSTEM)
    for process in (operator, FakeOperator(cluster, model=operator.model)):
        await process.calibration.load()
        process.client.requests.clear()
        for name in ("demo", "later", "demo", "later"):
            await process.settle(name)
        assert process.writes == []
    assert cluster.get(CONFIG_MAP, NAME, SYSTEM) == stored


@pytest.mark.parametrize("newest", ["more", "less"])
async def test_the_measurement_of_the_newest_pod_replaces_the_others_whatever_their_order(newest: str) -> None:
    """So a correction falls as well as rises, and a restart of the operator writes nothing."""
    cluster = gpu_world()
    operator = await measured(cluster)
    graphs = {"more": 600_000_000, "less": 200_000_000}
    for name in ("more", "less"):
        add(cluster, name)
        cluster.now = "2026-01-01T00:00:00Z" if name == newest else "2025-06-01T00:00:00Z"
        operator.model.ready["memory"] = {**MEASURED, "graphs_bytes": graphs[name]}
        await operator.settle(name)
    ((_, entry),) = entries(cluster).items()
    assert entry.correction.graphs_permille == {"more": 4471, "less": 1491}[newest]
    assert operator.status("less")["memory"]["measured"]["graphsBytes"] == 200_000_000
    stored = cluster.get(CONFIG_MAP, NAME, SYSTEM)
    restarted = FakeOperator(cluster, model=operator.model)
    for name in ("less", "more", "demo"):
        operator.model.ready["memory"] = {**MEASURED, "graphs_bytes": graphs.get(name, MEASURED["graphs_bytes"])}
        restarted.seconds += 1000
        await restarted.settle(name)
        await restarted.settle(name)
    assert cluster.get(CONFIG_MAP, NAME, SYSTEM) == stored


async def test_a_newest_measurement_that_confirms_what_is_stored_keeps_older_pods_out() -> None:
    """It is within the threshold, so it writes nothing."""
    cluster = gpu_world()
    operator = await measured(cluster)
    for name, now, graphs in (("newest", "2026-01-01", 440_000_000), ("older", "2025-06-01", 600_000_000)):
        add(cluster, name)
        cluster.now = f"{now}T00:00:00Z"
        operator.model.ready["memory"] = {**MEASURED, "graphs_bytes": graphs}
        await operator.settle(name)
    assert [entry.correction.graphs_permille for entry in entries(cluster).values()] == [3301]


@pytest.mark.parametrize(
    ("graphs", "said"),
    [
        (0, "graphs: 0 bytes measured"),
        (1, "graphs: 0.00 GB measured where 0.13 GB were predicted"),
        (1_400_000_000, "graphs: 1.40 GB measured where 0.13 GB were predicted"),
    ],
)
async def test_an_absurd_measurement_is_ignored_and_the_status_says_why(graphs: int, said: str) -> None:
    cluster = gpu_world()
    operator = await measured(cluster, graphs_bytes=graphs)
    assert operator.status()["memory"]["ignored"] == [said]
    assert all(entry.correction.graphs_permille == 1000 for entry in entries(cluster).values())


async def test_a_pool_that_the_requests_limit_says_nothing_of_the_memory() -> None:
    cluster = gpu_world()
    await measured(cluster, kv_cache_bytes=5_000_000_000, kv_cache_tokens=8192 * 256)
    ((_, entry),) = entries(cluster).items()
    assert entry.correction.other_permille == 1000


async def test_another_image_starts_from_predictions() -> None:
    cluster = gpu_world()
    operator = await measured(cluster)
    add(cluster, "other", runtime={"image": "registry.example.com/other:1"})
    await operator.settle("other")
    pinned = cluster.all(CONTROLLER_REVISION)
    assert all("calibration" not in one["data"]["plan"] for one in pinned)
    assert len(entries(cluster)) == 2


async def test_a_cpu_measures_nothing() -> None:
    cluster = world(manifest())
    operator = await measured(cluster)
    assert operator.status()["memory"]["measured"]["weightsBytes"] == MEASURED["weights_bytes"]
    assert cluster.get(CONFIG_MAP, NAME, SYSTEM) is None
    assert "ignored" not in operator.status()["memory"]


@pytest.mark.parametrize("status", [403, 404, 500])
async def test_a_write_that_fails_delays_no_model_and_is_tried_later(status: int) -> None:
    cluster = gpu_world()
    clean = await measured(gpu_world())
    at = [request.kind == "ConfigMap" and request.name == NAME for request in clean.client.written].index(True)
    model = FakeModel(cluster)
    model.ready = {"phase": "Ready", "memory": MEASURED}
    operator = FakeOperator(cluster, model=model, fault=Fault(at, ApiError(status, "", "no"), writes_only=True))
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    assert entries(cluster) == {}
    tried = sum(request.name == NAME for request in operator.client.written)
    await operator.settle()
    assert sum(request.name == NAME for request in operator.client.written) == tried, "not in every turn"
    operator.seconds += 301
    await operator.settle()
    assert len(entries(cluster)) == 1


async def test_a_write_of_another_leader_is_not_lost() -> None:
    cluster = gpu_world()
    operator = FakeOperator(cluster)
    operator.model.ready = {"phase": "Ready", "memory": MEASURED}
    await operator.calibration.load()
    other = CalibrationKey("image", "llama-1", "None", "L4", 2)
    cluster.put(config_map(SYSTEM, NAME, {other: Entry(other, Correction(), 1)}, "1"))
    await operator.settle()
    await operator.turn()
    assert len(entries(cluster)) == 2


def test_the_config_map_is_bounded_and_the_oldest_go_first() -> None:
    keys = [
        CalibrationKey("i" * 512, f"llama-{number}", "None", "A100-80GB-SXM", 8) for number in range(MAX_ENTRIES + 5)
    ]
    full = {key: Entry(key, Correction(), number) for number, key in enumerate(keys)}
    written = config_map(SYSTEM, NAME, full, "1")
    assert len(json.dumps(written)) < 200_000
    assert set(read_entries(written)) == set(keys[5:])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", "x" * 5000, '{"image": 1}', json.dumps({"image": "a"})],
)
def test_an_entry_that_cannot_be_read_is_dropped_alone(text: str) -> None:
    key = CalibrationKey("image", "llama-1", "None", "L4", 1)
    written = config_map(SYSTEM, NAME, {key: Entry(key, Correction(graphs_permille=3300), 3)}, "1")
    assert set(read_entries(written)) == {key}
    written["data"]["other"] = text
    assert set(read_entries(written)) == {key}
    tampered = json.loads(written["data"][data_key(key)]) | {"graphsPermille": -1}
    written["data"] = {"a": json.dumps(tampered)}
    assert read_entries(written) == {}


def test_an_entry_of_an_older_operator_is_read_and_any_pod_is_newer() -> None:
    key = CalibrationKey("image", "llama-1", "None", "L4", 1)
    written = config_map(SYSTEM, NAME, {key: Entry(key, Correction(graphs_permille=3300), 3, 99)}, "1")
    old = json.loads(written["data"][data_key(key)])
    del old["atSeconds"]
    assert not [name for name in old if "batch" in name or "decode" in name], "as before where no step was timed"
    written["data"] = {data_key(key): json.dumps(old)}
    assert read_entries(written) == {key: Entry(key, Correction(graphs_permille=3300), 3, 0)}
