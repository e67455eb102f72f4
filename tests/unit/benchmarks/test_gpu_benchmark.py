"""The GPU benchmark without a GPU: it says so in a sentence, and its dry run goes all the way and writes nothing."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu.roofline import most_tokens_per_second, peak_rates, sizes_of
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.workloads import ALONE, NANO, idle_share
from millstream_runtime.roofline import step_work

pytestmark = pytest.mark.deep


def test_it_refuses_in_one_sentence_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main([]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "needs a CUDA device" in captured.err


@pytest.mark.deep
def test_a_dry_run_measures_every_execution_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(benchmark.RESULTS.iterdir())
    assert benchmark.main(["--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("tiny")] == ["eager", "graphs", "graphs_overlapped"]
    assert sorted(benchmark.RESULTS.iterdir()) == before


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [([], 1.0), ([(0, 10)], 0.0), ([(0, 2), (8, 10)], 0.6), ([(0, 6), (1, 2), (5, 10)], 0.0), ([(8, 10), (0, 5)], 0.3)],
)
def test_the_idle_share_is_what_no_kernel_covers(intervals: list[tuple[float, float]], expected: float) -> None:
    assert idle_share(intervals) == pytest.approx(expected)


def test_the_roofline_of_a_load_is_that_of_its_steps() -> None:
    """By hand, 8.0 billion parameters, 36 layers of 8 KV heads of 128: 147,456 bytes per token of the cache."""
    config = SHAPES["Qwen3-8B"].config
    rates, sizes = peak_rates(), sizes_of(config)
    assert sizes.kv_bytes_per_token == 36 * 2 * 8 * 128 * 2
    assert 15.0e9 < sizes.read_bytes < 15.3e9
    seconds = 0.0
    for request, tokens in ((1, 101), (1, 102)):
        seconds += (sizes.read_bytes + tokens * sizes.kv_bytes_per_token) / rates.bytes_per_second * request
    prompt = step_work(sizes, 100, 0)
    assert prompt.num_bytes / rates.bytes_per_second > prompt.flops / rates.flops_per_second, "of a short prompt"
    attention = 4 * 36 * 32 * 128 * (100 * 100 // 2) / rates.flops_per_second
    seconds += sizes.read_bytes / rates.bytes_per_second + attention
    assert most_tokens_per_second(config, [(100, 3)], rates) == pytest.approx(3 / seconds)


def test_the_roofline_of_the_published_loads() -> None:
    rates = peak_rates()
    found = {name: most_tokens_per_second(one.config, NANO.lengths(), rates) for name, one in SHAPES.items()}
    assert found["Qwen3-0.6B"] == pytest.approx(40_300, rel=0.05)
    assert found["Qwen3-8B"] == pytest.approx(14_500, rel=0.05)
    assert most_tokens_per_second(SHAPES["Llama-3.1-8B"].config, ALONE.lengths(), rates) == pytest.approx(320, rel=0.05)
