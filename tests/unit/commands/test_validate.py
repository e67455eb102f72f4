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


def test_all_errors_of_a_file_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.yaml"
    text = EXAMPLE.read_text()
    bad.write_text(f"{text.replace('accelerator:', 'accelerators:')}\n---\n{text}  replicas: -1\n  service: 1\n")
    assert main(["validate", str(bad), str(EXAMPLE)]) == 1
    printed = capsys.readouterr()
    assert printed.out == f"{EXAMPLE}: ok\n"
    lines = printed.err.splitlines()
    assert len(lines) == 3, lines
    for line, part in zip(
        lines, ("accelerators: unknown field", "spec.replicas is -1", "spec.service is 1"), strict=True
    ):
        assert line.startswith(f"{bad}:")
        assert part in line
