"""On a GPU: every model family answers like transformers, and every way of sampling picks what a CPU picks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream_runtime.config import Device, DType, RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.request import Request, SamplingParams, TokenOutput
from tests.support.family_cases import CASES, Models
from tests.support.tiny_families import engine_answers, prompts_of, reference_answers
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.gpu
PROMPTS = prompts_of((15, 18, 31))
SEEDED = SamplingParams(24, temperature=0.9, seed=11, ignore_eos=True)
SAMPLING = {  # not top-p, for which a CPU draws again where a GPU sorts: the same distribution, other tokens
    "seeded": SEEDED,
    "top-k": replace(SEEDED, top_k=20),
    "min-p": replace(SEEDED, min_p=0.05),
    "penalties": replace(SEEDED, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2),
    "biases": replace(SEEDED, logit_bias=((7, 5.0), (9, -100.0))),
    "least tokens": replace(SEEDED, min_tokens=20, ignore_eos=False),
    "log-probabilities": replace(SEEDED, logprobs=3, prompt_logprobs=2),
}


def engine_of(folder: Path, device: Device, dtype: DType, execution: Execution | None = None, **asked: Any) -> Engine:
    settings: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory_bytes": 4 << 20} | asked
    config = RuntimeConfig(model=str(folder), served_model_name="t", device=device, dtype=dtype, **settings)
    return Engine(config, lambda phase, message: None, execution=execution)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("family", CASES)
def test_a_family_answers_like_transformers_in_float32(family: str, models: Models) -> None:
    try:
        expected = reference_answers(models.reference(family), PROMPTS, 12)
    except AssertionError as tie:  # another release of transformers may draw other weights from the case's seed
        pytest.skip(str(tie))
    engine = engine_of(models.folder(family), Device.CUDA, DType.FLOAT32)
    for _ in range(2):  # the second time prompts meet the blocks of the first
        assert engine_answers(engine, PROMPTS, 12) == expected


@pytest.mark.parametrize("family", ["llama-ratio-6-head-80", "mistral", "gemma2", "gemma3", "mixtral", "deepseek-v3"])
def test_overlap_changes_no_token_in_bfloat16(family: str, models: Models) -> None:
    plain = engine_of(models.folder(family), Device.CUDA, DType.BFLOAT16, Execution())
    overlapped = engine_of(models.folder(family), Device.CUDA, DType.BFLOAT16, Execution(overlapped=True))
    assert engine_answers(overlapped, PROMPTS, 12) == engine_answers(plain, PROMPTS, 12)


@pytest.mark.parametrize("family", ["qwen2-windows", "gemma2", "gemma3"])
def test_groups_of_layers_change_no_answer(family: str, models: Models) -> None:
    """A block table per group is off on a GPU by default: here it is on."""
    try:
        expected = reference_answers(models.reference(family), PROMPTS, 12)
    except AssertionError as tie:  # another release of transformers may draw other weights from the case's seed
        pytest.skip(str(tie))
    for execution in (Execution(), Execution(overlapped=True), None):  # None: as the engine serves, with graphs
        engine = engine_of(
            models.folder(family),
            Device.CUDA,
            DType.FLOAT32,
            execution,
            enable_hybrid_kv_cache_manager=True,
            max_num_batched_tokens=32,  # so that prompts enter in chunks, and windows free blocks between them
        )
        assert len(engine._blocks.windows) > 1
        for _ in range(2):  # the second time prompts meet the blocks of the first
            assert engine_answers(engine, PROMPTS, 12) == expected


def outputs_of(engine: Engine, sampling: SamplingParams) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(Request(str(index), prompt, sampling))
    while engine.has_work():
        outputs += engine.step()
    engine.check_integrity()
    return sorted(outputs, key=lambda output: output.request_id)  # which leaves each one's own order


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_picks_what_a_cpu_picks(name: str, folder: Path) -> None:
    on_cpu = outputs_of(engine_of(folder, Device.CPU, DType.FLOAT32), SAMPLING[name])
    on_gpu = outputs_of(engine_of(folder, Device.CUDA, DType.FLOAT32), SAMPLING[name])
    assert [one.token_id for one in on_gpu] == [one.token_id for one in on_cpu]
    assert [one.finish_reason for one in on_gpu] == [one.finish_reason for one in on_cpu]
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert (ours.logprobs is None) == (theirs.logprobs is None) == (SAMPLING[name].logprobs is None)
        if ours.logprobs is not None and theirs.logprobs is not None:
            assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)
