"""`millstream validate`: a line for each file, and an exit code for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.cli import main

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "demo.yaml"


def test_one_bad_file_among_good_ones_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(EXAMPLE.read_text().replace("accelerator:", "accelerators:"))
    assert main(["validate", str(EXAMPLE)]) == 0
    assert main(["validate", str(EXAMPLE), str(bad)]) == 1
    printed = capsys.readouterr()
    assert printed.out == f"{EXAMPLE}: ok\n" * 2
    assert printed.err.count("\n") == 1
    assert "accelerators: unknown field" in printed.err


def test_names_that_the_cluster_allows_are_given_by_a_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the chart's runtime.allowedEnv adds them to the CRD."""
    file = tmp_path / "logs.yaml"
    env = "  podTemplate: {spec: {containers: [{name: runtime, env: [{name: TORCH_LOGS, value: x}]}]}}\n"
    file.write_text(f"{EXAMPLE.read_text().rstrip()}\n{env}")
    assert main(["validate", str(file)]) == 1
    assert "TORCH_LOGS of podTemplate.spec.containers[].env is not accepted" in capsys.readouterr().err
    monkeypatch.setenv("MILLSTREAM_ALLOWED_ENV", "OTHER, TORCH_LOGS")
    assert main(["validate", str(file)]) == 0
    monkeypatch.setenv("MILLSTREAM_ALLOWED_ENV", "TORCH_*")
    assert main(["validate", str(file)]) != 0
    assert "MILLSTREAM_ALLOWED_ENV holds 'TORCH_*', which is no variable's name" in capsys.readouterr().err
