"""Decodes by the kernel that is compiled for a CPU, and by torch where it cannot be used: the same tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millstream_kernels.cpu.loaded_code import LoadedCode
from millstream_runtime.config import DType, KVCacheDType
from millstream_runtime.engine.cpu import decode_kernel
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.kernel_backends import Backend
from millstream_runtime.engine.request import Request
from tests.support.engines import MakeEngine, WriteModel, generate, greedy
from tests.support.family_cases import CASES, Models
from tests.support.tiny_families import prompts_of
from tests.support.ways import SAMPLINGS, WAYS, Answers, engine_in, make_requests

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads of each run of the compiled code."""
    seen: list[int] = []
    run = LoadedCode.run

    def counted(code: LoadedCode, task_address: int, num_threads: int) -> None:
        seen.append(num_threads)
        run(code, task_address, num_threads)

    monkeypatch.setattr(LoadedCode, "run", counted)
    return seen


@pytest.fixture
def _no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernel, "load", lambda: (None, "the CPU lacks avx2"))


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


@pytest.mark.parametrize("family", CASES)
def test_every_family_has_the_same_tokens_by_either(
    family: str, models: Models, make_engine: MakeEngine, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request(str(index), prompt, greedy(8)) for index, prompt in enumerate(prompts_of((15, 18, 31)))]
    engine: Engine = make_engine(models.folder(family))
    answers = generate(engine, requests)
    assert bool(runs) is (engine.kernels[0].backend is Backend.NUMBA)
    monkeypatch.setattr(decode_kernel, "load", lambda: (None, "it is off"))
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
    monkeypatch.setattr(decode_kernel, "load", lambda: (None, "it is off"))
    del runs[:]
    assert generate(make_engine(write_model(), kv_cache_dtype=stored), requests) == answers
    assert not runs


def test_what_the_kernel_does_not_take_is_torchs_and_said(
    write_model: WriteModel, make_engine: MakeEngine, runs: list[int]
) -> None:
    engine = make_engine(write_model(), dtype=DType.BFLOAT16)
    generate(engine, make_requests(SAMPLINGS["greedy"])[:2])
    assert not runs
    assert (engine.kernels[0].backend, engine.kernels[0].reason) == (Backend.TORCH, "dtype bfloat16")


def test_a_latent_key_is_torchs(models: Models, make_engine: MakeEngine, runs: list[int]) -> None:
    engine = make_engine(models.folder("deepseek-v3-half-split"))
    generate(engine, [Request("0", prompts_of((9,))[0], greedy(4))])
    assert engine.kernels[0].reason == "heads share a latent key (MLA)"
    assert not runs


def test_it_computes_with_as_many_threads_as_the_step(
    write_model: WriteModel, make_engine: MakeEngine, runs: list[int]
) -> None:
    engine = make_engine(write_model())
    generate(engine, make_requests(SAMPLINGS["greedy"]))
    assert {*runs} == {1}, "of `one_thread`"
