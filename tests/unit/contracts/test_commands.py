"""Every subcommand of `millstream` is registered, answers --help and is in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_file_of_commands_is_registered() -> None:
    files = {path.stem for path in (ROOT / "cli/millstream/commands").glob("*.py")} - {"__init__"}
    assert {module.rpartition(".")[2] for module, _ in COMMANDS.values()} == files


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"millstream {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_shows_the_command(command: str) -> None:
    assert any(f"millstream {command}" in page.read_text(encoding="utf-8") for page in PAGES)
