"""The GPU benchmark without a GPU: it says so in a sentence, and its dry run goes all the way and writes nothing."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu.workloads import idle_share


def test_it_refuses_in_one_sentence_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main([]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "needs a CUDA device" in captured.err


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
