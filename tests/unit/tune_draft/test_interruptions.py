"""Killed, stopped, or out of disk at any point: the output is complete or absent, and the next run goes on."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream_runtime.model_output import resumable_folder
from millstream_runtime.tune_draft.documents import Prompt
from millstream_runtime.tune_draft.target_answers import TargetModel
from millstream_runtime.tune_draft.target_sequence import TargetSequence
from tests.unit.tune_draft.conftest import FEW, contents, tune

pytestmark = pytest.mark.deep

STEPS = ("--steps=20", "--learning-rate=0.01")
EIGHT_STEPS = ("--steps=8", "--learning-rate=0.001", "--temperature=0")
# Kills its own process with SIGKILL when half of the n-th checkpoint is written.
CHILD = """
import os, signal, sys
from millstream_runtime.tune_draft import training
number, *argv = sys.argv[1:]
real, count = training.write_file, 0
def write_file(path, tensors):
    global count
    real(path, tensors)
    count += "checkpoint" in path.name
    if count == int(number):
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
training.write_file = write_file
import torch
torch.set_num_threads(1)
from millstream.cli import main
main(argv)
"""


def test_a_run_that_was_stopped_and_killed_gives_the_same_bytes(
    target: Path, draft: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    whole, out = tmp_path / "whole/tuned", tmp_path / "tuned"
    whole.parent.mkdir()
    code = tune(target, draft, data, whole, *STEPS)
    calls = _interrupted_answers(monkeypatch, at=3)
    assert tune(target, draft, data, out, *STEPS) == 130
    assert "interrupted; run the same command again" in capsys.readouterr().err
    monkeypatch.undo()
    work = tmp_path / ".tuned.tune-draft"
    made = {path.name: path.stat().st_mtime_ns for path in work.glob("*.safetensors")}
    assert len(made) == calls[0] - 1 == 2

    argv = ["tune-draft", str(target), str(draft), f"--data={data}", f"--out={out}", *FEW, *STEPS]
    child = subprocess.run([sys.executable, "-c", CHILD, "4", *argv], capture_output=True, text=True, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert not out.exists()
    for name, time in made.items():
        assert (work / name).stat().st_mtime_ns == time, "the target answered again"

    monkeypatch.setattr(TargetModel, "answers", _refuse)
    assert tune(target, draft, data, out, *STEPS) == code
    assert "going on after step 6" in capsys.readouterr().err
    assert contents(out) == contents(whole)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(
    target: Path, draft: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, flags = tmp_path / "out", ("--steps=2", "--temperature=0")
    with file_limit(150_000):  # answers fit, a checkpoint does not
        assert tune(target, draft, data, out, *flags) == 1
    error = capsys.readouterr().err
    assert "No space is left to write" in error
    assert "run the same command again" in error
    assert not out.exists()
    assert list(tmp_path.rglob("*.partial")) == []
    assert tune(target, draft, data, out, *flags) in (0, 3)


@pytest.fixture(scope="module")
def whole(
    target: Path, draft: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, bytes]]:
    """The exit code and the files of a run that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "tuned"
    return tune(target, draft, data, out, *EIGHT_STEPS), contents(out)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "damaged",
    [
        ("judged-00000.safetensors", "training-00001.safetensors", "plan.json", "checkpoint.safetensors"),
        ("best.safetensors",),
        ("watched-00000.safetensors",),
    ],
    ids=lambda names: names[0],
)
def test_files_of_the_work_folder_that_are_damaged_are_made_again(
    damaged: tuple[str, ...], target: Path, draft: Path, data: Path, whole: tuple[int, dict[str, bytes]],
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out, work = tmp_path / "tuned", tmp_path / ".tuned.tune-draft"
    with monkeypatch.context() as patched:
        patched.setattr("millstream_runtime.tune_draft.tune._Run._write_model", _interrupt)
        assert tune(target, draft, data, out, *EIGHT_STEPS) == 130
    for name in damaged:
        content = (work / name).read_bytes()
        (work / name).write_bytes(content[: len(content) // 2])
    capsys.readouterr()
    code = tune(target, draft, data, out, *EIGHT_STEPS)
    said = capsys.readouterr().err
    assert all(f"{work / name} is damaged: it is removed and made again" in said for name in damaged)
    assert (code, contents(out)) == whole


def test_a_kept_report_that_is_damaged_is_made_again(
    target: Path, draft: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--steps=1", "--learning-rate=1e-9", "--temperature=0", "--only-better")
    assert tune(target, draft, data, tmp_path / "out", *given) == 3
    kept = tmp_path / ".out.tune-draft" / "not-better.json"
    first = kept.read_text()
    for text in (first[:-20], "{}", "[]"):
        kept.write_text(text)
        assert tune(target, draft, data, tmp_path / "out", *given) == 3
        assert f"{kept} is damaged" in capsys.readouterr().err
        assert kept.read_text() == first


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_another_command_does_not_go_on_with_what_is_there(
    target: Path, draft: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    _interrupted_answers(monkeypatch, at=1)
    assert tune(target, draft, data, tmp_path / "out", *STEPS) == 130
    assert tune(target, draft, data, tmp_path / "out", *STEPS, "--seed=1") == 2
    assert "holds the work of another run, with another seed; remove" in capsys.readouterr().err


@pytest.mark.quick
def test_a_disk_that_is_too_small_is_refused_before_the_first_answer(
    target: Path, draft: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(resumable_folder, "SPARE_BYTES", 1 << 60)
    assert tune(target, draft, data, tmp_path / "out", *STEPS) == 1
    assert "GB free, and" in capsys.readouterr().err
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_a_chat_template_that_changed_between_two_runs_is_another_job(
    target: Path, draft: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The answers on disk are those to prompts in the other form."""
    pair = tmp_path / "target", tmp_path / "draft"
    for source, copy in zip((target, draft), pair, strict=True):
        shutil.copytree(source, copy)
    with monkeypatch.context() as patched:
        _interrupted_answers(patched, at=2)
        assert tune(*pair, data, tmp_path / "out", *STEPS) == 130
    for copy in pair:
        (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    capsys.readouterr()
    assert tune(*pair, data, tmp_path / "out", *STEPS) == 2
    assert "holds the work of another run, with another tokenizer of target; remove" in capsys.readouterr().err


def test_a_draft_that_is_replaced_while_it_is_tuned_makes_nothing(
    target: Path, draft: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    copy, real = tmp_path / "draft", TargetModel.answers
    shutil.copytree(draft, copy)

    def answers(self: TargetModel, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[TargetSequence]:
        shutil.copy(target / "config.json", copy / "config.json")
        return real(self, prompts, seeds)

    monkeypatch.setattr(TargetModel, "answers", answers)
    assert tune(target, copy, data, tmp_path / "out", "--steps=1", "--temperature=0") == 1
    assert f"{copy} was changed while this run read it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def _interrupted_answers(monkeypatch: pytest.MonkeyPatch, at: int) -> list[int]:
    """SIGINT in this thread when the target answers for that time; returns the count of calls."""
    calls, real = [0], TargetModel.answers

    def answers(self: TargetModel, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[TargetSequence]:
        calls[0] += 1
        if calls[0] == at:
            before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.signal(signal.SIGINT, before)
        return real(self, prompts, seeds)

    monkeypatch.setattr(TargetModel, "answers", answers)
    return calls


def _refuse(self: TargetModel, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[TargetSequence]:
    raise AssertionError("the target answered again")


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond that: writes fail as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
