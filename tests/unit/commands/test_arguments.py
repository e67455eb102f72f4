"""Command lines that argparse itself does not refuse in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.arguments import CommandLineParser
from millstream.cli import main
from millstream_runtime.errors import InvalidConfigError

COMMAND_LINES = {
    "serve": ["m", "--port=--"],
    "serve a switch": ["m", "--enforce-eager=--"],
    "plan": ["m.yaml", "--config=--"],
    "plan a list": ["m.yaml", "--gpus=--"],
    "fetch": ["--hugging-face", "org/name", "--into", "x", "--parallel=--"],
    "inspect": ["--path=--"],
    "quantize": ["m", "--method=rtn", "--out=x", "--sequence-tokens=--"],
    "quantize by a word": ["m", "--method=--", "--out=x"],
    "quality": ["a", "b", "--data=--"],
    "tune-draft": ["a", "b", "--data=x", "--out=x", "--steps=--"],
    "bench": ["offline", "--model=m", "--concurrency=1", "--seed=--"],
    "bench of two": ["--compare=--"],
}


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_two_dashes_as_the_value_of_a_flag_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = name.split()[0]
    assert main([command, *COMMAND_LINES[name]]) == (1 if command == "plan" else 2)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    assert said[0].startswith("millstream: argument --")
    assert "expected" in said[0]
    assert not [*tmp_path.iterdir()]


def test_two_dashes_before_an_argument_end_the_flags() -> None:
    parser = CommandLineParser(prog="it", allow_abbrev=False)
    parser.add_argument("--kind", type=int)
    parser.add_argument("files", nargs="+")
    assert parser.parse_args(["--", "--kind"]).files == ["--kind"]
    with pytest.raises(InvalidConfigError, match="--kind"):
        parser.parse_args(["--kind=--", "file"])
