"""`millstream completion`: what a real bash completes, and scripts that zsh and fish can read."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from pathlib import Path

import pytest

from millstream.cli import COMMANDS, main

# Runs the function as readline does: the words, and the number of the one under the cursor.
ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_millstream; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    assert main(["completion", "bash"]) == 0
    path = tmp_path / "millstream.bash"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path


def completed(script: Path, *words: str) -> list[str]:
    done = subprocess.run(
        ["/bin/bash", "-euc", ASK, "bash", script, "millstream", *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["qua"], ["quantize", "quality"]),
        (["help", "tu"], ["tune-draft"]),
        (["plan", "--comp"], ["--compare"]),
        (["plan", "--compare", "t"], ["tiers"]),
        (["plan", "--compare", ""], ["tiers", "gpus", "quantizations"]),
        (["serve", "folder", "--max-num-s"], ["--max-num-seqs"]),
        (["serve", "folder", "--device", "="], ["auto", "cpu", "cuda"]),  # of --device=
        (["serve", "folder", "--device", "=", "cu"], ["cuda"]),
        (["bench", ""], ["serve", "offline"]),
        (["bench", "serve", "--concurr"], ["--concurrency"]),
        (["completion", "z"], ["zsh"]),
        # nothing of ours: bash completes file names
        (["plan", ""], []),
        (["plan", "ex"], []),
        (["serve", "--config", ""], []),
        (["validate", "a.yaml", ""], []),
    ],
)
def test_bash_completes(script: Path, words: list[str], expected: list[str]) -> None:
    assert completed(script, *words) == expected
    assert "-o default" in script.read_text(encoding="utf-8")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_flag_of_every_command_is_in_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command, (module, _) in COMMANDS.items():
        lines = [line for line in script.splitlines() if command in line]
        for flag in importlib.import_module(module).command_parser()._option_string_actions:
            if flag.startswith("--"):
                word = f"-l {flag.removeprefix('--')}" if shell == "fish" else flag
                assert any(word in line for line in lines), (command, flag)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_can_read_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    main(["completion", shell])
    done = subprocess.run([program, "-n"], input=capsys.readouterr().out, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_shell_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert "bash" in capsys.readouterr().err
