"""A verdict names the files that it is about, and a folder that changes meanwhile gets none."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.cli import main
from millstream.termination import TERMINATION_LOG_VARIABLE
from millstream_operator.preparation.step_answers import files_in_words, read_step_answer
from millstream_operator.rendering.preparation_job import StepKind
from millstream_runtime.quality.judged_files import MAX_WHOLE_BYTES, digest_of, judged_files
from millstream_runtime.quality.streamed_model import StreamedModel
from tests.unit.quality.conftest import Change, noise, texts, write_data

Changed = Callable[[Change], Path]
WEIGHTS = "model.safetensors"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "held_out.jsonl", texts(20))


@pytest.fixture
def candidate(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "candidate"))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a container leaves as its termination message."""
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setenv(TERMINATION_LOG_VARIABLE, str(path))
    return path


def quality(base: Path, candidate: Path, data: Path, *flags: str) -> int:
    return main(["quality", str(base), str(candidate), f"--data={data}", "--device=cpu", "--worst=0", *flags])


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_report_and_the_termination_message_name_what_was_read(
    base: Path, candidate: Path, data: Path, log: Path, tmp_path: Path
) -> None:
    assert quality(base, candidate, data, f"--json={tmp_path / 'report.json'}") == 0
    report = json.loads((tmp_path / "report.json").read_text())
    for side, folder in (("base", base), ("candidate", candidate)):
        named = {file["name"]: file for file in report[side]["files"]}
        assert {"config.json", "tokenizer.json", WEIGHTS} <= named.keys()
        for name, file in named.items():
            expected = {"sha256": sha256(folder / name), "size_bytes": (folder / name).stat().st_size, "is_whole": True}
            assert file == {"name": name} | expected
    answer = read_step_answer(StepKind.JUDGE, log.read_text())
    assert isinstance(answer, dict)
    files: dict[str, Any] = answer["files"]
    assert files["data"] == {"sha256": sha256(data)}
    assert files["base"] == files["candidate"], "a copy has the digest of what it was copied from"
    assert files["candidate"]["files"] == len(report["candidate"]["files"])
    assert files_in_words(answer) == f"files sha256:{files['candidate']['sha256'][:12]}"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS])
def test_one_byte_of_a_file_is_another_digest(candidate: Path, name: str) -> None:
    before = digest_of(judged_files(candidate))
    content = bytearray((candidate / name).read_bytes())
    content[len(content) // 2] ^= 1
    (candidate / name).write_bytes(content)
    assert digest_of(judged_files(candidate)) != before


def test_a_large_file_is_named_by_size_header_and_samples(candidate: Path) -> None:
    """The file is sparse: 64 samples of 4 KiB are read of it, and the first of them has its header."""
    large = candidate / "model-00002-of-00002.safetensors"
    with large.open("wb") as sparse:
        sparse.truncate(MAX_WHOLE_BYTES + 1)
    found = {file.name: file for file in judged_files(candidate)}
    assert [file.name for file in found.values() if not file.is_whole] == [large.name]
    samples = {found[large.name].sha256}
    for changed_at in (0, MAX_WHOLE_BYTES - 4096):
        with large.open("r+b") as file:
            file.seek(changed_at)
            file.write(b"x" * 4096)
        samples |= {file.sha256 for file in judged_files(candidate) if file.name == large.name}
    with large.open("r+b") as file:
        file.truncate(MAX_WHOLE_BYTES + 2)
    samples |= {file.sha256 for file in judged_files(candidate) if file.name == large.name}
    assert len(samples) == 4


def other_weights(path: Path) -> bytes:
    content = bytearray(path.read_bytes())
    content[-400:] = content[-800:-400]
    return bytes(content)


def half(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: len(content) // 2]


@pytest.mark.parametrize("content", [other_weights, half], ids=["other weights", "half of them"])
def test_a_volume_that_is_replaced_while_it_is_read_gets_no_verdict(
    base: Path,
    candidate: Path,
    data: Path,
    log: Path,
    content: Callable[[Path], bytes],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a download does it: a new file takes the place of the old one."""
    real = StreamedModel.hidden_states

    def replaced(self: StreamedModel, *given: Any) -> Any:
        new = candidate / "weights.part"
        new.write_bytes(content(candidate / WEIGHTS))
        new.replace(candidate / WEIGHTS)
        return real(self, *given)

    monkeypatch.setattr(StreamedModel, "hidden_states", replaced)
    assert quality(base, candidate, data) == 1
    said = json.loads(log.read_text())
    assert said["reason"] == "CheckpointInvalid"
    assert said["message"].startswith(f"{candidate} was changed while it was judged ({WEIGHTS}), so the figures")
    shown = capsys.readouterr()
    assert "passed" not in shown.out
    assert "Judge it again when nothing writes into it." in shown.err


def test_a_file_that_goes_and_one_that_comes_are_named(
    base: Path, candidate: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StreamedModel.hidden_states

    def replaced(self: StreamedModel, *given: Any) -> Any:
        (candidate / "tokenizer.json").unlink(missing_ok=True)
        (candidate / "added_tokens.json").write_text("{}")
        return real(self, *given)

    monkeypatch.setattr(StreamedModel, "hidden_states", replaced)
    assert quality(base, candidate, data) == 1
    assert "was changed while it was judged (added_tokens.json, tokenizer.json)" in capsys.readouterr().err


@pytest.mark.parametrize("shard", ["cut", "missing"])
def test_a_half_written_volume_is_refused_with_the_file(
    base: Path, candidate: Path, data: Path, log: Path, shard: str
) -> None:
    weights = candidate / WEIGHTS
    if shard == "cut":
        weights.write_bytes(half(weights))
        wanted = f"{weights} ({weights.stat().st_size} bytes) is truncated or corrupt"
    else:
        named = "model-00002-of-00002.safetensors"
        (candidate / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": named}}))
        wanted = f"{candidate / named} is named by {WEIGHTS}.index.json but does not exist"
    assert quality(base, candidate, data) == 1
    said = json.loads(log.read_text())
    assert said["reason"] == "CheckpointInvalid"
    assert wanted in said["message"]


def test_a_read_only_volume_is_judged_and_nothing_is_written_into_it(base: Path, candidate: Path, data: Path) -> None:
    """Whatever is created in a folder, or removed again, changes its time."""
    for path in (*candidate.iterdir(), candidate):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in (*candidate.iterdir(), candidate)}
    assert quality(base, candidate, data) == 0
    assert {path: path.stat().st_mtime_ns for path in (*candidate.iterdir(), candidate)} == before
    candidate.chmod(0o755)


def test_a_candidate_that_is_worse_names_its_own_files(base: Path, changed: Changed, data: Path, log: Path) -> None:
    assert quality(base, changed(noise(0.5)), data) == 3
    files = json.loads(log.read_text())["files"]
    assert files["base"]["sha256"] != files["candidate"]["sha256"]


def test_a_name_that_is_no_utf_8_is_named_all_the_same(candidate: Path) -> None:
    (candidate / os.fsdecode(b"\xff.safetensors")).touch()
    assert json.dumps([file.name for file in judged_files(candidate)], ensure_ascii=False).encode()
    assert "\\udcff.safetensors" in {file.name for file in judged_files(candidate)}
