"""On a GPU: the same tokens by graphs, overlapped and eagerly; no launch waits; what graphs take is measured.

On a CPU `tests/unit/engine/execution` proves all but the calls of `torch.cuda` (`test_graphs.py`, `test_overlap.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_runtime.config import Device, DType, KVCacheDType, RuntimeConfig
from millstream_runtime.engine.device_events import CudaSpan
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.graphs.recorders import CudaRecorder, Recorder
from millstream_runtime.engine.kernel_backends import Backend
from millstream_runtime.engine.request import Request, SamplingParams
from tests.support.crowded import crowd
from tests.support.eager_recorder import EagerRecorder
from tests.support.family_cases import dense
from tests.support.tiny_families import engine_answers, prompts_of, write_family
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.gpu
EXECUTIONS: dict[str, Callable[[], Execution]] = {
    "eager": Execution,
    "padded": lambda: Execution(EagerRecorder()),
    "graphs": lambda: Execution(CudaRecorder(torch.device("cuda", 0))),
    "overlapped": lambda: Execution(overlapped=True),
    "graphs and overlapped": lambda: Execution(CudaRecorder(torch.device("cuda", 0)), overlapped=True),
}
GREEDY = SamplingParams(40, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(40, temperature=0.9, top_k=40, top_p=0.95, seed=7, ignore_eos=True)


PENALISED = SamplingParams(
    40, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=2
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def engine_of(folder: Path, how: str, dtype: DType = DType.FLOAT32, **config: Any) -> Engine:
    settings: dict[str, Any] = {"max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20} | config
    config_ = RuntimeConfig(model=str(folder), served_model_name="t", device=Device.CUDA, dtype=dtype, **settings)
    return Engine(config_, lambda phase, message: None, execution=EXECUTIONS[how]())


def answers_of(engine: Engine, sampling: SamplingParams) -> list[list[int]]:
    return engine_answers(engine, prompts_of((1, 9, 16, 40, 70)), sampling.max_tokens, sampling)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
@pytest.mark.parametrize("how", [name for name in EXECUTIONS if name != "eager"])
def test_the_same_tokens_in_float32(how: str, sampling: SamplingParams, folder: Path) -> None:
    expected = answers_of(engine_of(folder, "eager"), sampling)
    engine = engine_of(folder, how)
    for _ in range(2):
        assert answers_of(engine, sampling) == expected
    assert "graphs" not in how or (engine.graphs is not None and engine.graphs.replayed_steps > 0)


@pytest.mark.parametrize("how", ["eager", "overlapped", "graphs and overlapped"])
def test_the_same_tokens_where_prompts_enter_in_small_chunks(how: str, folder: Path) -> None:
    expected = answers_of(engine_of(folder, "eager"), GREEDY)
    engine = engine_of(folder, how)
    crowd(engine)
    assert answers_of(engine, GREEDY) == expected


def test_a_replay_is_the_pass_that_was_recorded_in_bfloat16(folder: Path) -> None:
    """Other kernels round otherwise, so bfloat16 is compared with the same padded pass without graphs."""
    padded = answers_of(engine_of(folder, "padded", DType.BFLOAT16), GREEDY)
    for how in ("graphs", "graphs and overlapped"):
        assert answers_of(engine_of(folder, how, DType.BFLOAT16), GREEDY) == padded


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(dtype, KVCacheDType.AUTO) for dtype in (DType.FLOAT32, DType.BFLOAT16)]
    + [(DType.BFLOAT16, KVCacheDType.INT8), (DType.BFLOAT16, KVCacheDType.FP8)],
)
@pytest.mark.parametrize("how", ["overlapped", "graphs and overlapped"])
def test_no_launch_waits_for_the_device(how: str, dtype: DType, stored: KVCacheDType, folder: Path) -> None:
    engine = engine_of(folder, how, dtype, kv_cache_dtype=stored)
    answers_of(engine, GREEDY)  # first calls take workspaces, and record what is met
    launch = engine._runner.launch

    def strictly(*step: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(*step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine._runner.launch = strictly  # type: ignore[method-assign, assignment]
    engine.add_request(Request("a", [1, 2, 3], GREEDY))
    engine.add_request(Request("b", [3, 2, 1, 4], SamplingParams(20, temperature=0.8, seed=3, ignore_eos=True)))
    engine.add_request(Request("c", [3, 2, 1, 4], replace(PENALISED, prompt_logprobs=1)))
    engine.add_request(Request("d", [3, 2], SEEDED))
    engine.add_request(Request("e", [3], replace(SEEDED, min_p=0.05, min_tokens=9, logit_bias=((3, 1.0),))))
    while engine.has_work():
        engine.step()


def test_prompts_are_computed_whole_beside_decodes(folder: Path) -> None:
    """A bound on time would let in a few tokens a step: see `prompt_share`."""
    engine = engine_of(folder, "graphs and overlapped", max_num_batched_tokens=64)
    engine.add_request(Request("decodes", [1, 2, 3], SamplingParams(200, temperature=0.0, ignore_eos=True)))
    for _ in range(100):
        engine.step()
    engine.add_request(Request("prompt", [5] * 500, SamplingParams(1, temperature=0.0, ignore_eos=True)))
    steps = 0
    while not any(output.request_id == "prompt" for output in engine.step()):
        steps += 1
    assert steps <= 500 // 63 + 2


def test_what_graphs_take_is_measured_and_stays_within_what_was_kept(folder: Path) -> None:
    engine = engine_of(folder, "graphs and overlapped")
    assert engine.graphs is not None
    assert engine.graphs.num_graphs > 0
    assert engine.graphs.num_refused == 0
    assert engine.memory_use.graphs_bytes is not None
    plan = engine._runner._graph_plan
    assert plan is not None
    assert plan.budget_bytes is not None
    assert 0 < engine.memory_use.graphs_bytes <= plan.budget_bytes


def test_a_failed_recording_leaves_a_device_that_works(folder: Path) -> None:
    """Reading a number back ends a capture; the next step must not notice."""
    recorder = CudaRecorder(torch.device("cuda", 0))
    one = torch.ones(1, device="cuda")
    calls: list[float] = []

    def compute() -> None:
        calls.append(one.sum().item() if len(calls) == 2 else 0.0)

    with pytest.raises(RuntimeError):
        recorder.record(compute)
    assert answers_of(engine_of(folder, "graphs"), GREEDY) == answers_of(engine_of(folder, "eager"), GREEDY)


def test_a_graph_holds_experts_of_kernels(tmp_path: Path) -> None:
    """Against the same padded pass without graphs: kernels round otherwise than torch."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "head_dim": 16}
    write_family(tmp_path, **dense("mixtral", **sizes))
    config = RuntimeConfig(
        model=str(tmp_path),
        served_model_name="t",
        device=Device.CUDA,
        dtype=DType.BFLOAT16,
        max_num_seqs=4,
        kv_cache_memory_bytes=4 << 20,
    )

    def answers(recorder: Recorder) -> list[list[int]]:
        execution = Execution(recorder, overlapped=True, backend=Backend.TRITON)
        engine = Engine(config, lambda phase, message: None, execution=execution)
        assert {one.part for one in engine.kernels if one.backend is Backend.TRITON} >= {"experts", "static_decode"}
        assert engine.graphs is not None
        assert engine.graphs.num_refused == 0
        return answers_of(engine, GREEDY)

    assert answers(CudaRecorder(torch.device("cuda", 0))) == answers(EagerRecorder())


def test_a_span_is_the_time_of_a_step_alone() -> None:
    def sleep(million_cycles: int) -> None:
        torch.cuda._sleep(million_cycles * 1_000_000)  # type: ignore[no-untyped-call]

    sleep(1)
    spans = []
    for million_cycles in (200, 50, 100):
        span = CudaSpan()
        sleep(million_cycles)
        span.end()
        spans.append(span)
    longest, shortest, middle = (span.seconds() for span in spans)
    assert 0 < shortest < middle < longest
