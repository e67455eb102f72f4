"""`benchmarks.cpu_mechanisms`: what it counts, which way its ratios point, and that each switch switches something."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks import cpu_mechanisms
from benchmarks.cpu_mechanisms import OFF, ON
from benchmarks.cpu_switches import MECHANISMS, Mechanism, no_copies
from benchmarks.cpu_workloads import Size, run_workload
from millstream_runtime.engine.engine import Engine
from millstream_runtime.models.cpu.linear import CpuLayout
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.deep

ROOT = Path(__file__).resolve().parents[3]
SIZE = Size(decode_tokens=3, batch_tokens=2, prompts=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def engine(folder: str) -> Engine:
    return cpu_mechanisms.make_engine(folder, Mechanism("none", ()))


@pytest.mark.parametrize(
    ("workload", "tokens"),
    [("decode-1", 3), ("decode-1-long", 3), ("decode-16", 32), ("prefill-512", 512), ("drain", sum(range(2, 18)))],
)
def test_a_workload_counts_its_tokens_and_leaves_the_engine_idle(engine: Engine, workload: str, tokens: int) -> None:
    sample = run_workload(workload, engine, random.Random(1), SIZE)
    assert sample.tokens == tokens
    assert not engine.has_work()
    engine.check_integrity()


def test_a_burst_counts_prompts_and_answers_and_its_longest_step(engine: Engine) -> None:
    sample = run_workload("burst", engine, random.Random(1), SIZE)
    assert sample.tokens >= 15 * 20 + 15
    assert sample.gap_seconds is not None
    assert sample.gap_seconds <= sample.seconds
    assert not engine.has_work()


def test_mixed_counts_prompts_and_answers_and_its_slow_steps(engine: Engine) -> None:
    sample = run_workload("mixed", engine, random.Random(1), SIZE)
    assert sample.tokens > 2 * 512
    assert sample.gap_seconds is not None
    assert not engine.has_work()


@pytest.mark.deep
def test_both_engines_of_a_mechanism_take_turns_on_all_its_workloads(folder: str) -> None:
    mechanism = Mechanism("two", ("decode-1", "drain"), no_copies)
    samples = cpu_mechanisms.measure(folder, mechanism, [ON, OFF], 2, SIZE)["samples"]
    assert {state: {name: len(of) for name, of in found.items()} for state, found in samples.items()} == {
        ON: {"decode-1": 2, "drain": 2},
        OFF: {"decode-1": 2, "drain": 2},
    }


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda one: one.name)
def test_every_mechanism_can_be_switched_off(mechanism: Mechanism) -> None:
    with mechanism.given(), mechanism.off():  # raises where the engine has no such thing any more
        pass
    assert mechanism.off is not Mechanism("", ()).off or mechanism.environment_off


def test_an_engine_without_copies_has_none() -> None:
    weight = torch.randn(64, 32).bfloat16().float().t()
    with no_copies():
        plain = CpuLayout(torch.float32, 1 << 30).linear(weight, None)
    copied = CpuLayout(torch.float32, 1 << 30).linear(weight, None)
    assert (plain.half, plain.packed) == (None, None)
    assert copied.packed is not None


def test_a_ratio_above_one_is_a_gain() -> None:
    def sample(seconds: float) -> dict[str, float]:
        return {"tokens": 10, "seconds": seconds, "processor_seconds": 2 * seconds, "gap_seconds": seconds / 10}

    summary = cpu_mechanisms.summarise([sample(1), sample(1), sample(2)], [sample(2), sample(3), sample(2)])
    assert summary["ratio"] == {"median": 2.0, "low": 1.0, "high": 3.0}
    assert summary["gap_ratio"]["median"] == 2.0
    assert summary["tokens_per_second"] == {ON: 10.0, OFF: 5.0}


def test_the_engine_page_has_the_table_of_the_committed_results() -> None:
    results = json.loads(cpu_mechanisms.RESULT.read_text(encoding="utf-8"))["models"]
    page = (ROOT / "docs/engine.md").read_text(encoding="utf-8").splitlines()
    rows = cpu_mechanisms.table(results).splitlines()
    assert len(rows) > 2
    assert [line for line in rows if line not in page] == []
