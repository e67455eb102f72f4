"""Killed, stopped, or out of disk at any point: the output is complete or absent, and the next run goes on."""

from __future__ import annotations

import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream_runtime.model_output import resumable_folder
from millstream_runtime.quantize import make
from millstream_runtime.quantize.output import work_folder
from tests.support.killed_quantization import killed
from tests.unit.quantize.conftest import contents, quantize

pytestmark = pytest.mark.deep

METHODS = ("rtn", "awq", "gptq")


@pytest.mark.matrix
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_killed_goes_on_and_gives_the_same_bytes(
    method: str, tiny: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--max-sequences=32", "--sequence-tokens=128")
    flags = (f"--method={method}", f"--calibration={data}", *few, *(() if method == "rtn" else ("--no-quality",)))
    whole = tmp_path / "whole/model"
    whole.parent.mkdir()
    quantize(tiny, whole, *flags)
    out = tmp_path / "model"
    killed(2, "within", tiny, out, *flags)
    work = tmp_path / ".model.quantize/model"
    first = work / "model-00002-of-00005.safetensors"
    done_at = first.stat().st_mtime_ns
    killed(4, "before", tiny, out, *flags)
    assert first.stat().st_mtime_ns == done_at  # the first layer was not made again
    capsys.readouterr()
    quantize(tiny, out, *flags)
    assert "going on after layer 3 of 4" in capsys.readouterr().err
    assert contents(out) == contents(whole)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_files_of_layers_that_are_cut_are_made_again(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, whole, out = ("--method=rtn", "--no-quality"), tmp_path / "whole", tmp_path / "model"
    quantize(tiny, whole, *flags)
    killed(4, "before", tiny, out, *flags)
    cut = [tmp_path / f".model.quantize/model/model-0000{number}-of-00005.safetensors" for number in (1, 3)]
    for path in cut:
        path.write_bytes(path.read_bytes()[:-100])
    capsys.readouterr()
    assert quantize(tiny, out, *flags) == 0
    said = capsys.readouterr().err
    assert all(f"{path} is damaged: it is removed and made again" in said for path in cut)
    weights = {name: one for name, one in contents(out).items() if name.endswith(".safetensors")}
    assert weights.items() <= contents(whole).items()


def test_another_command_does_not_go_on_with_what_is_there(
    tiny: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    with file_limit(60_000):
        assert quantize(tiny, out, "--method=rtn", "--no-quality") == 1
    capsys.readouterr()
    assert quantize(tiny, out, "--method=rtn", "--group-size=32", "--no-quality") == 2
    assert "holds the work of another run, with another quantization config; remove" in capsys.readouterr().err
    note = tmp_path / ".model.quantize/job.json"
    note.write_text(note.read_text()[:20])  # a volume that lost its end
    assert quantize(tiny, out, "--method=rtn", "--group-size=32", "--no-quality", "--discard-other-work") == 0
    assert "held the work of a run with another" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.quick
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "model"
    quantize(tiny, whole, "--method=rtn", "--no-quality")
    capsys.readouterr()
    with file_limit(20_000):
        assert quantize(tiny, out, "--method=rtn", "--no-quality") == 1
    error = capsys.readouterr().err
    assert "No space is left to write" in error
    assert "run the same command again" in error
    assert not out.exists()
    assert list(tmp_path.rglob("*.partial")) == []
    assert quantize(tiny, out, "--method=rtn", "--no-quality") == 0
    weights = {name: one for name, one in contents(out).items() if name.endswith(".safetensors")}
    assert weights.items() <= contents(whole).items()


@pytest.mark.quick
@pytest.mark.parametrize("how", ["flag", "variable"])
def test_data_that_could_not_judge_the_result_is_refused_before_the_first_layer(
    tiny: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """In the cluster the gate judges after hours of quantizing."""
    few = tmp_path / "held-out.jsonl"
    few.write_text('{"text": "abc"}\n')

    def run(path: Path) -> int:
        monkeypatch.setenv("MILLSTREAM_CHECK_DATA", str(path) if how == "variable" else "")
        flags = [f"--check-data={path}"] if how == "flag" else []
        return quantize(tiny, tmp_path / "out", "--method=rtn", "--no-quality", *flags)

    for path, words in ((few, "document"), (tmp_path / "none.jsonl", "--check-data")):
        assert run(path) == 2
        assert words in capsys.readouterr().err
        assert list(tmp_path.rglob("*.safetensors")) == []
    assert run(data) == 0


@pytest.mark.quick
def test_a_disk_that_is_too_small_is_refused_before_the_first_layer(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable_folder, "SPARE_BYTES", 1 << 60)
    assert quantize(tiny, tmp_path / "out", "--method=rtn", "--no-quality") == 1
    assert "GB free, and" in capsys.readouterr().err
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_ctrl_c_says_how_to_go_on(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = work_folder.WorkFolder.write_shard

    def interrupted(self: work_folder.WorkFolder, number: int, tensors: dict[str, object]) -> None:
        if number == 2:
            signal.raise_signal(signal.SIGINT)  # in this thread, now
        real(self, number, tensors)  # type: ignore[arg-type]

    monkeypatch.setattr(work_folder.WorkFolder, "write_shard", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with it ignored
    try:
        assert quantize(tiny, tmp_path / "out", "--method=rtn", "--no-quality") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "interrupted; run the same command again" in capsys.readouterr().err
    monkeypatch.undo()
    assert quantize(tiny, tmp_path / "out", "--method=rtn", "--no-quality") == 0
    assert "going on after layer 1 of 4" in capsys.readouterr().err


def test_sigterm_says_how_to_go_on(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(make, "_write_model", lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        with pytest.raises(SystemExit) as ended:
            quantize(tiny, tmp_path / "out", "--method=rtn", "--no-quality")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143
    assert "millstream: stopped by SIGTERM; run the same command again to go on" in capsys.readouterr().err


def test_a_run_that_is_stopped_while_it_removes_its_work_says_that_the_model_is_there(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (tiny, tmp_path / "out", "--method=rtn", "--no-quality")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("millstream_runtime.model_output.resumable_folder.shutil.rmtree", interrupted)
        assert quantize(*given) == 130
    assert f"{tmp_path / 'out'} is there; the same command with --keep-made" in capsys.readouterr().err
    assert quantize(*given, "--keep-made") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_tokenizer_that_changed_between_two_runs_is_another_job(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokens of the calibration follow from it, and a run that went on would mix those of both."""
    model, out = tmp_path / "tiny", tmp_path / "out"
    shutil.copytree(tiny, model)
    with file_limit(60_000):
        assert quantize(model, out, "--method=rtn", "--no-quality") == 1
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    capsys.readouterr()
    assert quantize(model, out, "--method=rtn", "--no-quality") == 2
    assert "holds the work of another run, with another tokenizer; remove" in capsys.readouterr().err


def test_weights_that_are_replaced_while_they_are_read_make_nothing(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = tmp_path / "tiny", tmp_path / "out"
    shutil.copytree(tiny, model)
    real = work_folder.WorkFolder.write_shard

    def replaced(self: work_folder.WorkFolder, number: int, tensors: dict[str, object]) -> None:
        if number == 2:
            weights = bytearray((model / "model.safetensors").read_bytes())
            weights[-400:] = weights[-800:-400]
            (model / "model.safetensors").write_bytes(weights)
        real(self, number, tensors)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(work_folder.WorkFolder, "write_shard", replaced)
        assert quantize(model, out, "--method=rtn", "--no-quality") == 1
    assert f"{model} was changed while this run read it" in capsys.readouterr().err
    assert not out.exists()
    assert quantize(model, out, "--method=rtn", "--no-quality") == 2
    assert quantize(model, out, "--method=rtn", "--no-quality", "--discard-other-work") == 0


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond that: writes fail as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
