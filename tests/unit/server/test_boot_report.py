"""What a boot costs, in seconds and bytes, and when it will be over: measured, or left out."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from safetensors import safe_open

from millstream.boot_progress import BootProgress, reading
from millstream_runtime.boot import BootLedger, Phase, WeightsProgress
from millstream_runtime.boot_eta import eta_seconds
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.execution.kernel_choice import PARTS
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice
from millstream_runtime.engine_process.boot_events import REPORT_INTERVAL_SECONDS, BootEvents
from millstream_runtime.engine_process.messages import Event, PhaseEntered, WeightsRead
from millstream_runtime.server.operations.boot_gauges import kernel_gauges
from tests.support.server_thread import ServerThread

GIB = 1 << 30


def loading(done_bytes: int, total_bytes: int, seconds: float, at_seconds: float = 100.0) -> BootLedger:
    ledger = BootLedger(0.0)
    ledger.enter(Phase.LOADING_WEIGHTS)
    ledger.read_weights(WeightsProgress(done_bytes, total_bytes, seconds, at_seconds))
    return ledger


def test_the_rest_of_the_weights_is_estimated_by_what_was_read() -> None:
    boot = loading(25, 100, 10.0).snapshot()
    assert eta_seconds(boot, 100.0) == pytest.approx(30.0)
    assert eta_seconds(boot, 112.0) == pytest.approx(18.0), "the report has aged"
    assert eta_seconds(boot, 500.0) == 0.0
    assert eta_seconds(loading(0, 100, 0.0).snapshot(), 100.0) is None, "nothing is read yet"


def test_a_first_boot_guesses_nothing() -> None:
    ledger = BootLedger(0.0)
    for phase in (Phase.STARTING, Phase.LOADING_WEIGHTS, Phase.SIZING_KV_CACHE, Phase.WARMING_UP, Phase.READY):
        ledger.enter(phase)
        assert eta_seconds(ledger.snapshot(), 0.0) is None


def test_a_second_engine_is_estimated_by_the_boot_of_the_first() -> None:
    ledger = BootLedger(process_age_seconds=20.0)
    ledger.enter(Phase.LOADING_WEIGHTS)
    ledger.enter(Phase.READY)
    ledger.enter(Phase.UNRESPONSIVE)
    ledger.restart("The engine died.")
    boot = ledger.snapshot()
    assert boot.weights is None
    assert boot.num_bytes == {}
    assert eta_seconds(boot, 0.0) == pytest.approx(20.0, abs=5.0)
    ledger.enter(Phase.WARMING_UP)
    assert eta_seconds(ledger.snapshot(), 0.0) is None, "the first did not tell what that takes"


def test_a_checkpoint_of_many_tensors_is_told_a_few_times_a_second() -> None:
    events: list[Event] = []
    now = [50.0]
    boot_events = BootEvents(events.append, clock=lambda: now[0])
    boot_events("LoadingWeights", "Reading.")
    for count in range(1001):
        boot_events.weights_read(count, 1000)
        now[0] += REPORT_INTERVAL_SECONDS / 100
    assert events[0] == PhaseEntered("LoadingWeights", "Reading.")
    weights = [event.progress for event in events[1:] if isinstance(event, WeightsRead)]
    assert 11 <= len(weights) <= 13
    assert (weights[0].done_bytes, weights[0].seconds) == (0, 0.0)
    assert (weights[-1].done_bytes, weights[-1].total_bytes) == (1000, 1000)
    assert weights[-1].bytes_per_second == pytest.approx(1000 / (10 * REPORT_INTERVAL_SECONDS))


def test_a_person_sees_bytes_rate_and_rest() -> None:
    assert reading(loading(3 * GIB, 6 * GIB, 2.0).snapshot()) == "3.00 GiB of 6.00 GiB, 1.50 GiB/s, 2 s left"
    assert reading(loading(6 * GIB, 6 * GIB, 4.0).snapshot()) == "6.00 GiB, 1.50 GiB/s"
    assert reading(BootLedger(0.0).snapshot()) == ""
    ledger, out = loading(6 * GIB, 6 * GIB, 4.0), io.StringIO()
    view = BootProgress(ledger, RuntimeConfig(model="/m", served_model_name="m"), 1, out, live=True)
    ledger.enter(Phase.SIZING_KV_CACHE)
    view.close()
    assert "6.00 GiB, 1.50 GiB/s\n" in out.getvalue()


def test_ready_and_metrics_tell_what_was_measured_and_nothing_else(server: ServerThread, tiny_model: Path) -> None:
    body = server.get("/ready").json()
    with safe_open(tiny_model / "model.safetensors", "pt") as file:
        elements = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    file_bytes = 4 * sum(elements.values())  # float32 in the file and in memory, nothing tied
    copies_bytes = 4 * sum(num for name, num in elements.items() if name.endswith("proj.weight") or "lm_head" in name)
    pool_bytes = body["memory"]["kv_cache_bytes"]
    assert 0 < pool_bytes <= server.config.kv_cache_memory_bytes
    activations_bytes = body["memory"].pop("activations_bytes")
    assert 0 < activations_bytes < 1 << 30
    assert body["memory"] == {
        "weights_bytes": file_bytes + copies_bytes,  # every linear lies there in two layouts
        "graphs_bytes": 0,
        "kv_cache_bytes": pool_bytes,
        "kv_cache_tokens": pool_bytes // (2 * 2 * 2 * 16 * 4),  # layers, K and V, KV heads, head size, bytes
    }
    assert body["boot_bytes"] == {"LoadingWeights": file_bytes, "SizingKVCache": pool_bytes}
    assert body["weights_bytes_per_second"] > 0
    assert not {"progress", "eta_seconds"} & set(body), "the boot is over"

    # Its model has no experts, so nothing was chosen for them.
    reason = "kernels run on GPUs, and this engine computes on a CPU"
    by_numba = {"backend": "numba", "reason": "the kernel takes this model"}
    compiled = dict.fromkeys(("decode_attention", "prompt_attention", "rope_kv_write", "norm", "activation"), by_numba)
    others = {part: {"backend": "torch", "reason": reason} for part in PARTS if part != "experts"}  # it has none
    weights = "weights and products are float32: --dtype is auto, and the checkpoint is float32"
    held = {"dense_linear": {"backend": "torch", "reason": weights}}
    assert body["kernels"] == others | compiled | held
    assert server.metric("millstream_kernel_backend", part="attention", backend="torch", reason=reason) == 1
    assert server.metric("millstream_memory_bytes", use="weights") == file_bytes + copies_bytes
    assert server.metric("millstream_memory_bytes", use="kv_cache") == pool_bytes
    assert server.metric("millstream_memory_bytes", use="activations") == activations_bytes
    assert server.metric("millstream_kv_cache_tokens", model_name="tiny") == body["memory"]["kv_cache_tokens"]
    assert server.metric("millstream_boot_phase_bytes", phase="LoadingWeights") == file_bytes
    assert server.metric("millstream_weights_load_bytes_per_second", model_name="tiny") > 0


def test_ready_tells_the_threads_that_the_warm_up_chose(server: ServerThread) -> None:
    body = server.get("/ready").json()["threads"]
    assert body[-1]["most_tokens"] is None, "the last holds for the largest steps"
    assert [one["most_tokens"] for one in body[:-1]] == sorted(one["most_tokens"] for one in body[:-1])
    assert all(1 <= one["threads"] <= body[-1]["threads"] for one in body)


def test_kernels_that_the_boot_looked_up_are_counted_by_result() -> None:
    choices = [KernelChoice("norm", Backend.TRITON, "the kernels take this model")]
    lookups = {"found": 7, "damaged": 1, "compiled": 1}
    _, family = kernel_gauges({"model_name": "tiny"}, choices, lookups)
    assert {one.labels["result"]: one.value for one in family.samples} == lookups
    assert {one.labels["model_name"] for one in family.samples} == {"tiny"}
    assert [*kernel_gauges({}, [], {})] == [], "nothing is known before the model is loaded"
