"""How the host waits for steps of a device and times them, on a fake of CUDA's events."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from millstream_runtime.engine.device_events import CudaSpan, Mark
from millstream_runtime.engine.device_policy import AcceleratorPolicy
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution import model_runner
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.scheduling.pacing import StepTime
from tests.support.engines import MakeEngine, WriteModel, generate, greedy, requests_for

pytestmark = pytest.mark.usefixtures("one_thread")


class FakeDevice:
    """A queue of work, in milliseconds. The host's time passes only while it waits."""

    def __init__(self) -> None:
        self.host = self.busy_until = 0.0

    def enqueue(self, milliseconds: float) -> None:
        self.busy_until = max(self.host, self.busy_until) + milliseconds

    def event(self, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self, enable_timing)


class FakeEvent:
    """`torch.cuda.Event`: refuses what CUDA refuses."""

    def __init__(self, device: FakeDevice, has_time: bool) -> None:
        self._device, self._has_time = device, has_time
        self._at: float | None = None

    def record(self) -> None:
        self._at = max(self._device.host, self._device.busy_until)

    def synchronize(self) -> None:
        assert self._at is not None, "waits for nothing"
        self._device.host = max(self._device.host, self._at)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self._has_time
        assert end._has_time
        assert self._at is not None
        assert end._at is not None
        assert end._at <= self._device.host, "not ready"
        return end._at - self._at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    return fake


def test_a_span_is_a_step_alone(device: FakeDevice) -> None:
    device.enqueue(100)  # the step before
    span = CudaSpan()
    device.enqueue(30)
    span.end()
    device.enqueue(50)  # the step behind
    assert span.seconds() == pytest.approx(0.03)
    assert device.host == 130, "it has waited for this step and for no other"
    device.host = 500.0  # the host plans
    idle = CudaSpan()
    device.enqueue(20)
    idle.end()
    assert idle.seconds() == pytest.approx(0.02)


def test_a_mark_waits_on_a_device_alone(device: FakeDevice) -> None:
    device.enqueue(40)
    on_cpu, on_device = Mark(torch.device("cpu")), Mark(torch.device("cuda", 0))
    device.enqueue(40)
    on_cpu.wait()
    assert device.host == 0
    on_device.wait()
    on_device.wait()
    assert device.host == 40


def test_a_gpu_times_its_steps_by_events_and_a_cpu_by_the_host_s_clock(device: FakeDevice) -> None:
    assert isinstance(AcceleratorPolicy(torch.device("cuda", 0)).begin_span(), CudaSpan)
    assert AcceleratorPolicy(torch.device("cpu")).begin_span() is None


DECODE, PROMPT_TOKEN = 5.0, 0.25  # milliseconds


def on_fake_device(engine: Engine, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> list[StepTime]:
    """Let the engine's steps take DECODE and PROMPT_TOKEN on a device. Returns what its pace learns."""
    monkeypatch.setattr(engine._policy, "begin_span", CudaSpan)
    launch, pace = engine._runner.launch, engine._pace
    assert pace is not None

    def launched(chunks: Any) -> Any:
        device.enqueue(sum(DECODE if n == 1 else PROMPT_TOKEN * n for _, n in chunks))
        return launch(chunks)

    learned: list[StepTime] = []
    observe = pace.observe

    def observed(step: StepTime) -> None:
        learned.append(step)
        observe(step)

    engine._runner.launch = launched  # type: ignore[method-assign]
    monkeypatch.setattr(pace, "observe", observed)
    return learned


def test_the_pace_learns_what_steps_take_on_the_device(
    write_model: WriteModel, make_engine: MakeEngine, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch returns at once, and a chunk that samples nothing has nothing to read: only events know."""
    folder = write_model()
    prompt = [[7 * place % 190 for place in range(40)]]
    expected = generate(make_engine(folder), requests_for(prompt, greedy(4)))
    engine = make_engine(folder, execution=Execution(overlapped=True), max_num_batched_tokens=16)
    engine.step_clock = lambda: 0.0
    learned = on_fake_device(engine, device, monkeypatch)
    assert generate(engine, requests_for(prompt, greedy(4))) == expected
    assert [(one.num_decodes, one.prompt_work > 0) for one in learned] == [(0, True)] * 3 + [(1, False)] * 3
    milliseconds = [tokens * PROMPT_TOKEN for tokens in (16, 16, 8)] + [DECODE] * 3
    assert [1000 * one.seconds for one in learned] == pytest.approx(milliseconds)


def test_a_step_that_samples_nothing_is_awaited(
    write_model: WriteModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the host would launch all chunks of a long prompt at once, and whoever comes meanwhile would wait for all."""
    events: list[str] = []

    class Watched(Mark):
        def wait(self) -> None:
            events.append("wait")
            super().wait()

    engine = make_engine(write_model(), execution=Execution(overlapped=True), max_num_batched_tokens=16)
    launch = engine._runner.launch

    def launched(chunks: Any) -> Any:
        events.append("launch")
        return launch(chunks)

    engine._runner.launch = launched  # type: ignore[method-assign]
    monkeypatch.setattr(model_runner, "Mark", Watched)
    generate(engine, requests_for([list(range(2, 62))], greedy(1)))
    assert events == ["launch", "launch", "wait", "launch", "wait", "launch", "wait"]
