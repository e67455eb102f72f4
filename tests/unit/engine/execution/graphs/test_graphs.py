"""CUDA graphs: what is recorded when, that replays give the same tokens, and that a failure harms nobody."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution import execution_mode, model_loading
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.graphs import graph_budget, graphed_decodes
from millstream_runtime.engine.execution.graphs.buckets import Bucket, Buckets
from millstream_runtime.engine.execution.graphs.graphed_decodes import GraphCost, GraphPlan, GraphUse
from millstream_runtime.engine.execution.graphs.recorders import Recorder
from millstream_runtime.engine.execution.step_input import ChunkInput
from millstream_runtime.engine.kv.pool_size import cuda_budget
from millstream_runtime.models.registry import load_model_config
from tests.support.eager_recorder import EagerRecorder
from tests.support.engines import MakeEngine, WriteModel, generate, greedy, requests_for
from tests.support.family_cases import Models
from tests.support.runtime_args import from_args, to_args
from tests.support.tape_recorder import TapeRecorder
from tests.support.tiny_families import prompts_of as family_prompts
from tests.support.tiny_families import reference_answers
from tests.unit.engine.test_parity import prompts_of

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = prompts_of(199, [1, 15, 16, 40, 70])


def use_of(engine: Engine) -> GraphUse:
    assert engine.graphs is not None
    return engine.graphs


def test_replays_give_the_same_tokens_and_nothing_is_recorded_twice(
    write_model: WriteModel, make_engine: MakeEngine
) -> None:
    expected = generate(make_engine(write_model()), requests_for(PROMPTS, greedy(30)))
    recorder = TapeRecorder()
    engine = make_engine(write_model(), execution=Execution(recorder))
    at_boot = use_of(engine)
    assert at_boot.num_graphs == len(recorder.tapes) == len(Buckets(8, 16, 1 << 30).to_record()) == 18
    assert (at_boot.replayed_steps, engine.memory_use.graphs_bytes) == (0, sum(recorder.tapes))
    assert (at_boot.seconds, at_boot.num_bytes) == (0.25 * at_boot.num_graphs, sum(recorder.tapes))
    for _ in range(2):
        assert generate(engine, requests_for(PROMPTS, greedy(30))) == expected
    use = use_of(engine)
    assert len(recorder.tapes) == at_boot.num_graphs, "nothing is recorded under traffic"
    assert (use.num_graphs, use.eager_steps) == (at_boot.num_graphs, 0)
    assert use.replayed_steps > 40


def test_the_boot_says_how_far_it_is(write_model: WriteModel) -> None:
    config = RuntimeConfig(
        model=str(write_model()),
        served_model_name="t",
        device=Device.CPU,
        kv_cache_memory_bytes=1 << 20,
        max_num_seqs=8,
    )
    said: list[tuple[str, str]] = []
    Engine(config, lambda phase, message: said.append((phase, message)), execution=Execution(EagerRecorder()))
    assert [one for one in said if one[0] == "WarmingUp"] == [
        ("WarmingUp", "Recording CUDA graphs: 0 of 18."),
        ("WarmingUp", "Recording CUDA graphs: 16 of 18."),
    ]


@pytest.mark.parametrize("fail_after", [0, 2])
def test_a_recording_that_fails_leaves_its_bucket_eager_and_every_answer_as_it_was(
    fail_after: int, write_model: WriteModel, make_engine: MakeEngine
) -> None:
    expected = generate(make_engine(write_model()), requests_for(PROMPTS, greedy(30)))
    engine = make_engine(write_model(), execution=Execution(TapeRecorder(fail_after)))
    for _ in range(2):
        assert generate(engine, requests_for(PROMPTS, greedy(30))) == expected
    use = use_of(engine)
    assert (use.num_graphs, use.num_refused) == (fail_after, 18 - fail_after)
    assert use.eager_steps > 0


@pytest.mark.parametrize(("budget_bytes", "seconds"), [(25, 1000.0), (None, 0.7)])
def test_beyond_the_budget_of_memory_or_time_buckets_are_left_eager(budget_bytes: int | None, seconds: float) -> None:
    plan = GraphPlan(Buckets(8, 16, 1 << 30), 16, budget_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphed_decodes, "RECORDING_SECONDS", seconds)
        use = plan.record_all(lambda bucket: GraphCost(0.25, 10), lambda message: None)
    assert (use.num_graphs, use.num_refused, use.num_left, use.num_bytes) == (3, 0, 15, 30)
    assert plan.bucket_of([ChunkInput(1, 250, 0, 0, 16)]) == Bucket(1, 16)
    assert plan.bucket_of([ChunkInput(1, 50, 0, 0, 4)]) is None, "left eager"
    assert plan.bucket_of([ChunkInput(1, 250, 0, 0, 16), ChunkInput(5, 5, 0, 16, 1)]) is None, "a prompt"
    assert (plan.use.replayed_steps, plan.use.eager_steps) == (1, 1)


def test_a_recording_that_reads_numbers_back_fails_as_on_a_device() -> None:
    with pytest.raises(RuntimeError, match="waits for the device"):
        TapeRecorder().record(lambda: print(torch.ones(1).item()))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("graphs"))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "family", ["llama-biases", "mistral", "gemma2", "gemma3", "phi4-longrope", "mixtral", "deepseek-v3"]
)
def test_a_family_of_each_kind_answers_like_transformers_from_replays(
    family: str, models: Models, make_engine: MakeEngine
) -> None:
    """Torch's experts choose rows on the host, so no graph can hold them: such models replay by calling again."""
    waits = load_model_config(models.folder(family)).has_experts
    recorder: Recorder = EagerRecorder() if waits else TapeRecorder()
    engine = make_engine(models.folder(family), execution=Execution(recorder))
    prompts = family_prompts((15, 18, 31))
    answers = generate(engine, requests_for(prompts, greedy(12)))
    assert list(answers.values()) == reference_answers(models.reference(family), prompts, 12)
    assert use_of(engine).replayed_steps > 0


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3"])
def test_what_waits_for_the_device_cannot_be_frozen(family: str, models: Models, make_engine: MakeEngine) -> None:
    """So `waits_for_device` says the truth: the tape of one step does not compute another."""
    engine = make_engine(models.folder(family), execution=Execution(TapeRecorder()))
    assert engine._runner._forward.model.waits_for_device
    prompts = family_prompts((15, 18, 31))
    answers = generate(engine, requests_for(prompts, greedy(12)))
    assert list(answers.values()) != reference_answers(models.reference(family), prompts, 12)


def test_who_runs_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_mode, "CudaRecorder", lambda device: "recorder")
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)

    def chosen(device: torch.device, **overrides: Any) -> tuple[Any, bool]:
        config = RuntimeConfig(model="/models/x", served_model_name="x", **overrides)
        how = execution_mode.choose(config, device)
        return how.recorder, how.overlapped

    assert chosen(cpu) == (None, False)
    assert chosen(cuda) == ("recorder", True)
    assert chosen(cuda, enforce_eager=True) == (None, True)
    assert chosen(cuda, tensor_parallel_size=2) == ("recorder", True)


@pytest.mark.parametrize(("family", "has_graphs"), [("llama", True), ("mixtral", False), ("deepseek-v3", False)])
def test_what_waits_for_the_device_has_no_graphs(
    family: str, has_graphs: bool, models: Models, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu = Execution(TapeRecorder(), overlapped=True)
    monkeypatch.setattr(model_loading, "choose", lambda config, device: on_a_gpu)
    engine = make_engine(models.folder(family), max_num_seqs=2)
    assert (engine.graphs is not None) == has_graphs
    prompts = family_prompts((15, 18))
    answers = generate(engine, requests_for(prompts, greedy(6)))
    assert list(answers.values()) == reference_answers(models.reference(family), prompts, 6)


@pytest.mark.parametrize(
    ("argv", "says"), [([], False), (["--enforce-eager"], True), (["--enforce-eager=false"], False)]
)
def test_the_flag_is_vllm_s(argv: list[str], says: bool) -> None:
    config = from_args(["--model=/models/x", *argv])
    assert config.enforce_eager is says
    assert from_args(to_args(config)) == config


def test_graphs_are_reserved_before_the_pool_takes_the_rest() -> None:
    """Llama-3.1-8B's shape on a card of 24 GB and on one of 141: what a step may copy follows the card."""
    block_bytes = 32 * 2 * 8 * 128 * 2 * 16
    for total_bytes, held, too_large in ((24 << 30, (64, 64), (128, 64)), (141 << 30, (256, 128), (256, 256))):
        limit_bytes = total_bytes * 9 // 10
        buckets = graph_budget.buckets_within(
            limit_bytes,
            block_bytes=block_bytes,
            num_layers=32,
            max_num_seqs=256,
            max_model_len=32768,
            block_size_tokens=16,
        )
        assert buckets.holding(*held) == Bucket(*held)
        assert buckets.holding(*too_large) is None
        copied = max(bucket.cells for bucket in buckets) * block_bytes // 32
        assert copied <= limit_bytes * graph_budget.GATHER_SHARE_PERCENT // 100
        estimate = graph_budget.estimate_bytes(buckets, block_bytes=block_bytes, num_layers=32)
        assert copied < estimate < limit_bytes * 5 // 100
        budget = cuda_budget(limit_bytes, 16 << 30, 1 << 30, estimate)
        assert budget.available_bytes == limit_bytes - (17 << 30) - estimate
        assert budget.activations_bytes == 1 << 30
    assert graph_budget.estimate_bytes(Buckets(4, 4, 1), block_bytes=block_bytes, num_layers=32) == 0


def test_a_pool_of_which_no_padded_step_may_be_copied_has_no_graphs(
    write_model: WriteModel, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_budget, "GATHER_SHARE_PERCENT", 0)
    engine = make_engine(write_model(), execution=Execution(TapeRecorder()))
    assert engine.graphs is None
    assert engine.memory_use.graphs_bytes == 0
    assert len(generate(engine, requests_for(PROMPTS, greedy(3)))) == len(PROMPTS)


def test_a_cpu_s_engine_has_none(write_model: WriteModel) -> None:
    config = RuntimeConfig(
        model=str(write_model()), served_model_name="t", device=Device.CPU, kv_cache_memory_bytes=1 << 20
    )
    engine = Engine(config, lambda phase, message: None)
    assert (engine.graphs, engine.memory_use.graphs_bytes) == (None, 0)
