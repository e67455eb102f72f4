"""The command on a pipe that ends early, a full disk, a closed stream, and a terminal without UTF-8: no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.output_streams import can_redraw

pytestmark = pytest.mark.deep

ROOT = Path(__file__).resolve().parents[3]
MID = ("plan", "examples/mid.yaml", "--gpus", "A100-40GB:2")
DEMO = ("plan", "examples/demo.yaml")


def run(*arguments: str, before: str = "", after: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command in a shell, with redirections before or after it."""
    words = " ".join([sys.executable, "-m", "millstream", *arguments])
    # Streams of users are buffered; a test runner may have switched that off.
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONUNBUFFERED", "LC_ALL", "LANG")
    }
    shell = ["/bin/bash", "-c", f"{before}{words} {after}"]
    return subprocess.run(
        shell, cwd=ROOT, env=inherited | environment, capture_output=True, check=False, close_fds=False
    )


@contextmanager
def pipe_that_ended() -> Iterator[int]:
    """Yield the end to write to, which the shell of `run` inherits.

    The other end is closed already: behind `| head` a quick command may have written everything before it ends.
    """
    reader, writer = os.pipe()
    os.close(reader)
    os.set_inheritable(writer, True)
    try:
        yield writer
    finally:
        os.close(writer)


@pytest.mark.parametrize("arguments", [("--help",), ("plan", "--help"), ("validate", "examples/demo.yaml"), MID])
def test_a_pipe_that_ends_early_is_no_error(arguments: tuple[str, ...]) -> None:
    with pipe_that_ended() as writer:
        done = run(*arguments, after=f">&{writer}")
    assert done.stderr == b""
    assert done.returncode == 0


@pytest.mark.parametrize("arguments", [("--help",), ("plan", "--help"), ("validate", "examples/demo.yaml"), MID])
def test_an_output_that_cannot_be_written_is_one_sentence(arguments: tuple[str, ...]) -> None:
    done = run(*arguments, after="> /dev/full")
    assert done.stderr == b"millstream: Standard output cannot be written: No space left on device.\n"
    assert done.returncode == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&-"])
def test_closed_streams_change_no_exit_code(closed: str) -> None:
    done = run(*DEMO, after=closed)
    assert done.stderr == b""
    assert done.returncode == 0


@pytest.mark.quick
def test_a_path_that_the_file_system_refuses_is_one_sentence() -> None:
    done = run("inspect", "--path", "y" * 300)
    assert done.stderr.decode() == f"millstream: {'y' * 300}: File name too long.\n"
    assert done.returncode == 1


@pytest.mark.quick
def test_a_failure_without_stderr_is_not_written_to_stdout() -> None:
    done = run("validate", "missing.yaml", after="2>&-")
    assert (done.returncode, done.stdout) == (1, b"")


@pytest.mark.parametrize(
    "environment", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}]
)
def test_a_terminal_without_utf_8_gets_what_it_can_show(environment: dict[str, str]) -> None:
    done = run(*MID, **environment)
    assert (done.returncode, done.stderr) == (0, b"")
    first = done.stdout.decode("latin-1").splitlines()[0]
    assert first in ("mid: 2xA100-40GB TP2 AWQ", "mid: 2×A100-40GB TP2 AWQ")


def test_json_keeps_every_character_without_utf_8() -> None:
    asked = (*MID, "-o", "json")
    assert json.loads(run(*asked, PYTHONIOENCODING="ascii").stdout) == json.loads(run(*asked).stdout)


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_child_process_has_a_standard_error_where_the_parents_is_closed(closed: str) -> None:
    """Its own files got the number: the warnings of a library went into a socket."""
    child = "import os, sys; os.fstat(2); sys.exit(0 if sys.stderr is not None else 1)"
    parent = (
        "import subprocess, sys; from millstream.output_streams import prepare_output_streams; "
        f"prepare_output_streams(); sys.exit(subprocess.run([sys.executable, '-c', '{child}']).returncode)"
    )
    done = subprocess.run(["/bin/bash", "-c", f'exec {sys.executable} -c "{parent}" {closed}'], cwd=ROOT, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("unwritable", ["2> /dev/full", "2>&{pipe}"])
@pytest.mark.parametrize(("flags", "code"), [(["--bogus"], 2), (["no-such-folder"], 1)])
def test_a_failure_that_stderr_does_not_take_keeps_its_code_and_its_termination_message(
    unwritable: str, flags: list[str], code: int, tmp_path: Path
) -> None:
    message = tmp_path / "message"
    message.touch()
    with pipe_that_ended() as pipe:
        after = unwritable.format(pipe=pipe)
        done = run("serve", *flags, after=after, MILLSTREAM_TERMINATION_LOG=str(message))
    assert done.returncode == code
    assert json.loads(message.read_text())["message"]


@pytest.mark.quick
def test_a_pipe_that_ends_early_changes_no_exit_code_of_a_failure() -> None:
    with pipe_that_ended() as writer:
        done = run("validate", "examples/demo.yaml", "missing.yaml", after=f">&{writer}")
    assert b"missing.yaml: cannot be read" in done.stderr
    assert done.returncode == 1


def test_a_terminal_that_cannot_redraw_gets_no_line_that_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = os.openpty()
    with os.fdopen(controller), os.fdopen(terminal, "w") as stream:
        monkeypatch.setenv("TERM", "xterm-256color")
        assert can_redraw(stream)
        monkeypatch.setenv("TERM", "dumb")
        assert not can_redraw(stream)
