"""Several runs for one output folder, and output folders that no rename can replace."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from millstream.cli import main
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.model_output.companion_files import companions_digest, copy_companions
from millstream_runtime.model_output.resumable_folder import ResumableFolder
from millstream_runtime.quantize.output.work_folder import WorkFolder
from millstream_runtime.sources.lock import LOCK_NAME, FolderLock
from tests.unit.quantize.conftest import contents, quantize

RTN = ("--method=rtn", "--no-quality")


@pytest.mark.deep
@pytest.mark.parametrize(("method", "flags", "code"), [("gguf", ("--keep-made",), 0), ("rtn", (), 2)])
def test_a_second_run_waits_and_finds_the_model_of_the_first(
    method: str, flags: tuple[str, ...], code: int, wide: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    waits, codes, real = threading.Event(), dict[str, int](), WorkFolder.finish
    second = threading.Thread(target=lambda: run("second"))

    def run(name: str) -> None:
        codes[name] = quantize(wide, tmp_path / "out", f"--method={method}", "--no-quality", *flags)

    def finish(work: ResumableFolder) -> None:
        """The first run is about to rename when the second one begins to wait for it."""
        second.start()
        assert waits.wait(120)
        real(work)

    monkeypatch.setattr("millstream.making_arguments.unwind_on_sigterm", lambda: None)  # main threads alone may
    monkeypatch.setattr(WorkFolder, "finish", finish)
    real_wait = FolderLock._wait_until_free

    def wait(lock: FolderLock) -> None:
        waits.set()
        real_wait(lock)

    monkeypatch.setattr(FolderLock, "_wait_until_free", wait)
    run("first")
    second.join(120)
    assert codes == {"first": 0, "second": code}
    found = capsys.readouterr()
    assert "is there already; --keep-made takes it" in found.out if flags else "is not an empty folder" in found.err
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "no work folder is left"
    before = contents(tmp_path / "out")
    assert quantize(wide, tmp_path / "out", f"--method={method}", "--keep-made") == 0
    assert contents(tmp_path / "out") == before


@pytest.mark.deep
def test_a_run_that_stood_still_and_lost_its_folder_to_another_writes_nothing_more(tmp_path: Path) -> None:
    """It would cut files that the other is writing: both write them under one name."""
    work = ResumableFolder(tmp_path / "out", "quantize")

    def lose(path: Path) -> None:
        path.write_text("half")
        (work.path / LOCK_NAME).write_text(json.dumps({"owner": {"token": "another's"}, "beat": 3}))

    with work.locked(lambda text: None):
        work.open({"version": 1}, lambda text: None)
        work.write_text(work.model / "before", "text")
        with pytest.raises(RuntimeFailure, match="Another run has taken over"):
            work.write(work.model / "meanwhile", lose)
        with pytest.raises(RuntimeFailure, match="Another run has taken over"):
            work.write_text(work.model / "after", "text")
        with pytest.raises(RuntimeFailure, match="Another run has taken over"):
            work.finish()
    left = {path.name for path in work.model.iterdir()}
    assert left == {"before", "meanwhile.partial"}, "the other may be writing the partial file"
    assert not work.out.exists()


@pytest.mark.deep
@pytest.mark.parametrize("command", ["quantize", "tune-draft"])
def test_what_a_run_left_that_died_after_its_rename_is_removed(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft's checkpoint has 12 bytes per weight, and a cache in the cluster has nobody to remove it."""
    out, work = tmp_path / "out", tmp_path / f".out.{command}"
    for folder in (out, work):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
    report = {"verdict": "better", "reasons": [], "slices": []}
    (out / "tuning.json").write_text(json.dumps(report))
    given = ["--method=rtn"] if command == "quantize" else ["draft", "--data=traffic.jsonl"]
    assert main([command, "model", *given, f"--out={out}", "--keep-made"]) == 0
    assert "is there already" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_no_rename_can_replace_is_refused_before_anything_is_made(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert quantize(tiny, tmp_path / "link", *RTN) == 2
    assert f"is a symbolic link, which no folder can replace; give {tmp_path}/link/model." in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr("os.path.ismount", lambda path: path == tmp_path / "real")
        assert quantize(tiny, tmp_path / "real", *RTN) == 2
    assert "is a mount point" in capsys.readouterr().err
    assert quantize(tiny, tmp_path / ("x" * 300), *RTN) == 2
    assert "cannot be used: File name too long." in capsys.readouterr().err
    assert quantize(tiny, tmp_path / ("x" * 250), *RTN) == 1, "the name of the work folder is longer"
    assert ".quantize: File name too long." in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_links_in_a_circle_are_one_sentence(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for out in (tmp_path / "circle", tmp_path / "circle" / "out"):
        assert quantize(tiny, out, *RTN) == 2
        assert capsys.readouterr().err.startswith(f"millstream: --out {out} cannot be used")


@pytest.mark.parametrize("command", ["quantize", "tune-draft"])
def test_names_that_are_no_utf_8_are_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The library of safetensors opens no such file: the run would end after its last layer."""
    bad, good = str(tmp_path / os.fsdecode(b"\xff")), str(tmp_path / "good")
    given = ["--method=rtn"] if command == "quantize" else ["draft", "--data=traffic.jsonl"]
    for model, out in ((bad, good), (good, bad)):
        assert main([command, model, *given, f"--out={out}"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"millstream: The name {tmp_path}/\\udcff has bytes that are no UTF-8")


@pytest.mark.parametrize("linked", [".out.quantize", ".out.quantize/model"])
def test_a_link_in_the_place_of_a_work_folder_is_refused(
    linked: str, wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a cache that several write to, the model would be made, and changed later, where the link leads."""
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "models" / linked
    elsewhere.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    assert quantize(wide, tmp_path / "models" / "out", *RTN) == 2
    assert f"{link} is a symbolic link, and no run of Millstream makes one; remove it." in capsys.readouterr().err
    assert not any(elsewhere.iterdir())
    assert not (tmp_path / "models" / "out").exists()


def test_every_file_that_decides_the_chat_template_is_copied(tmp_path: Path) -> None:
    """Those of `template_source`; a change of one is another model to go on from."""
    source, work = tmp_path / "source", ResumableFolder(tmp_path / "out", "quantize")
    names = ["chat_template.jinja", "chat_template.json", "processor_config.json", "tokenizer_config.json"]
    names += ["additional_chat_templates/default.jinja", "additional_chat_templates/tool_use.jinja"]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"of {name}")
    (source / "additional_chat_templates" / "x.py").write_text("1")
    with work.locked(lambda sentence: None):
        work.open({"source": "it"}, lambda sentence: None)
        copy_companions(source, work)
        copied = {str(file.relative_to(work.model)): file for file in work.model.rglob("*") if file.is_file()}
        assert {name: file.read_text() for name, file in copied.items()} == {name: f"of {name}" for name in names}
    before = companions_digest(source)
    (source / "additional_chat_templates" / "default.jinja").write_text("another")
    assert companions_digest(source) != before
