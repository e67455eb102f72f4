"""Decodes by the kernel that is compiled for a CPU, and by torch where it cannot be used: the same tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millstream_kernels.cpu.loaded_code import LoadedCode
from millstream_runtime.config import DType, KVCacheDType
from millstream_runtime.engine.cpu import compiled_code
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.kernel_backends import Backend
from millstream_runtime.engine.request import Request, TokenLogprobs
from tests.support.engines import MakeEngine, WriteModel, generate, greedy
from tests.support.family_cases import CASES, Models
from tests.support.tiny_families import prompts_of
from tests.support.ways import SAMPLINGS, WAYS, Answers, engine_in, make_requests

pytestmark = pytest.mark.usefixtures("one_thread")
ROUNDING = {DType.BFLOAT16: 0.1, DType.FLOAT16: 0.01}  # of a log-probability


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads of each run of the compiled code that computes decodes."""
    seen: list[int] = []
    run = LoadedCode.run

    def counted(code: LoadedCode, kernel: str, task_address: int, num_threads: int) -> None:
        if kernel == "paged_decode":
            seen.append(num_threads)
        run(code, kernel, task_address, num_threads)

    monkeypatch.setattr(LoadedCode, "run", counted)
    return seen


@pytest.fixture
def _no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_code, "load", lambda: (None, "the CPU lacks avx2"))


@pytest.mark.matrix
@pytest.mark.usefixtures("_no_code")
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("way", WAYS)
def test_torch_decodes_to_the_same_tokens_in_every_way(
    way: str,
    sampling: str,
    write_model: WriteModel,
    make_engine: MakeEngine,
    alone: Callable[[str], Answers],
    runs: list[int],
) -> None:
    expected = alone(sampling)
    del runs[:]
    engine = engine_in(WAYS[way], make_engine, write_model(), "plain")
    assert WAYS[way].run(engine, make_requests(SAMPLINGS[sampling])) == expected
    assert not runs
    assert (engine.kernels[0].backend, engine.kernels[0].reason) == (Backend.TORCH, "the CPU lacks avx2")
    engine.check_integrity()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


@pytest.mark.matrix
@pytest.mark.parametrize("family", CASES)
def test_every_family_has_the_same_tokens_by_either(
    family: str, models: Models, make_engine: MakeEngine, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request(str(index), prompt, greedy(8)) for index, prompt in enumerate(prompts_of((15, 18, 31)))]
    engine: Engine = make_engine(models.folder(family))
    answers = generate(engine, requests)
    assert runs
    assert engine.kernels[0].backend is Backend.NUMBA
    monkeypatch.setattr(compiled_code, "load", lambda: (None, "it is off"))
    del runs[:]
    assert generate(make_engine(models.folder(family)), requests) == answers
    assert not runs


@pytest.mark.parametrize("stored", [KVCacheDType.INT8, KVCacheDType.FP8])
def test_keys_in_8_bits_are_decoded_to_the_tokens_of_torch(
    stored: KVCacheDType,
    write_model: WriteModel,
    make_engine: MakeEngine,
    runs: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = make_requests(SAMPLINGS["greedy"])
    answers = generate(make_engine(write_model(), kv_cache_dtype=stored), requests)
    assert runs
    monkeypatch.setattr(compiled_code, "load", lambda: (None, "it is off"))
    del runs[:]
    assert generate(make_engine(write_model(), kv_cache_dtype=stored), requests) == answers
    assert not runs


@pytest.mark.matrix("dtype")
@pytest.mark.parametrize("family", ["llama", "deepseek-v3-half-split"])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_16_bits_are_decoded_as_by_torch_but_for_roundings(
    dtype: DType, family: str, models: Models, make_engine: MakeEngine, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token has about the probability that torch's attention gives it, and another follows a near-tie alone."""
    requests = [
        Request(str(index), prompt, greedy(12, logprobs=4)) for index, prompt in enumerate(prompts_of((15, 18, 31)))
    ]
    engine = make_engine(models.folder(family), dtype=dtype)
    assert (engine.kernels[0].backend, engine.kernels[0].reason) == (Backend.NUMBA, "the kernel takes this model")
    by_kernel = described(engine, requests)
    assert runs
    monkeypatch.setattr(compiled_code, "load", lambda: (None, "it is off"))
    del runs[:]
    by_torch = described(make_engine(models.folder(family), dtype=dtype), requests)
    assert not runs
    for name, tokens in by_torch.items():
        for token, wanted in zip(by_kernel[name], tokens, strict=True):
            probable = dict(wanted.top)
            assert token.logprob == pytest.approx(probable[token.token_id], abs=ROUNDING[dtype])
            if token.token_id != wanted.token_id:
                assert wanted.logprob - probable[token.token_id] < ROUNDING[dtype]
                break  # from here on they answer different texts


def described(engine: Engine, requests: list[Request]) -> dict[str, list[TokenLogprobs]]:
    """The answers, all at once."""
    answers: dict[str, list[TokenLogprobs]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        for output in engine.step():
            assert output.logprobs is not None
            answers[output.request_id].append(output.logprobs)
    return answers


def test_it_computes_with_as_many_threads_as_the_step(
    write_model: WriteModel, make_engine: MakeEngine, runs: list[int]
) -> None:
    engine = make_engine(write_model())
    generate(engine, make_requests(SAMPLINGS["greedy"]))
    assert {*runs} == {1}, "of `one_thread`"
