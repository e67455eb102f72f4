"""The engine with our products of 16-bit weights for few rows, in the interpreter: torch's tokens in every family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream_runtime.engine import assembly
from millstream_runtime.engine.execution import model_loading, rank_kernels
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.kernel_backends import Backend
from millstream_runtime.engine.request import Request
from millstream_runtime.models.layers.triton_layers import TritonLayers
from tests.support.drafting_engines import N_GRAMS
from tests.support.engines import MakeEngine, generate, greedy
from tests.support.family_cases import CASES
from tests.support.kernel_launches import Launch, recording_launches
from tests.support.tiny_families import prompts_of, write_family
from tests.support.triton_interpreter import interpreting

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]
TRITON = Execution(backend=Backend.TRITON)
DENSE = TritonLayers(norms=False, activations=False, linears=False, rotates=False, experts=False, dense_linears=True)
# Products of a step. With rows of 60 numbers only those that go back from the 40 of the MLP are the kernel's.
PRODUCTS = {
    "llama-ratio-5-tied": 2 * 1,
    "qwen3-head-80-tied-biases": 2 * 4 + 1,
    "qwen3-moe": None,
    "deepseek-v3": None,
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Of engines whose dense linears alone are computed by kernels."""
    monkeypatch.setattr(rank_kernels, "layer_kernels", lambda *chosen: DENSE)
    monkeypatch.setattr(model_loading, "backend_of", lambda part, choices: Backend.TORCH)  # of attention
    monkeypatch.setattr(assembly, "sampler_kernels", lambda choices: None)
    with interpreting(), recording_launches() as recorded:
        yield recorded


@pytest.mark.parametrize("family", PRODUCTS)
def test_a_family_answers_alike(family: str, tmp_path: Path, make_engine: MakeEngine, launches: list[Launch]) -> None:
    folder, case = tmp_path / family, CASES[family]
    write_family(folder, seed=case.seed, **case.config)
    few = [Request(str(index), prompt, greedy(2)) for index, prompt in enumerate(prompts_of((1, 9, 18)))]
    steps = 2  # of prompts, and of decodes
    expected = generate(make_engine(folder, execution=Execution(backend=Backend.TORCH)), few)
    launches.clear()
    assert generate(make_engine(folder, execution=TRITON), few) == expected
    assert {launch.kernel for launch in launches} == {"w16a16_product"}
    if (products := PRODUCTS[family]) is not None:
        assert len(launches) == products * steps


def test_checks_of_drafts_answer_as_decodes_do(tmp_path: Path, make_engine: MakeEngine, launches: list[Launch]) -> None:
    folder = tmp_path / "llama"
    write_family(folder, **CASES["llama"].config)
    repeated = [prompt[:9] * 5 for prompt in prompts_of((9, 9))]
    few = [Request(str(index), prompt, greedy(6)) for index, prompt in enumerate(repeated)]
    expected = generate(make_engine(folder, execution=TRITON), few)
    without_drafts = len(launches)
    launches.clear()
    engine = make_engine(folder, execution=TRITON, **N_GRAMS)
    assert generate(engine, few) == expected
    assert {launch.kernel for launch in launches} == {"w16a16_product"}
    assert len(launches) % (2 * 4 + 1) == without_drafts % (2 * 4 + 1) == 0, "whole steps"
    speculation = engine.stats().speculation
    assert speculation is not None
    assert speculation.num_draft_tokens > 0
