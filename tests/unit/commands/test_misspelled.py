"""A misspelled command or flag is answered with the one that was meant; `help COMMAND` is `COMMAND --help`."""

from __future__ import annotations

import pytest

from millstream.cli import COMMANDS, main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sreve"], "Unknown command 'sreve'; did you mean serve? The commands are: plan, serve, "),
        (["help", "quantise"], "Unknown command 'quantise'; did you mean quantize?"),
        (["dance"], "Unknown command 'dance'. The commands are: "),
        (["serve", "x", "--prot=1"], "unrecognized arguments: --prot=1; did you mean --port?"),
        (["serve", "x", "--max-num-seq", "4"], "--max-num-seq; did you mean --max-num-seqs?"),
        (["validate", "x", "--zzz"], "unrecognized arguments: --zzz (see `millstream validate --help`)."),
        # argparse alone says that --into is missing
        (["fetch", "--hugging-face=org/name", "--inot=x"], "--inot=x; did you mean --into?"),
        (["bench", "offline", "--model=m", "--concurency=1"], "--concurency=1; did you mean --concurrency?"),
    ],
)
def test_the_nearest_word_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_what_stands_behind_two_dashes_is_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--", "--zzz"]) == 1
    assert "--zzz: cannot be read: No such file or directory." in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("columns", ["20", "200"])
def test_help_of_a_command_is_its_own_however_narrow_the_terminal(
    command: str, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as ended:
        main(["help", command])
    assert ended.value.code == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(f"usage: millstream {command}")
