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
