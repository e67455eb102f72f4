"""`millstream quality` as a person types it, on tiny models: verdicts, exit codes, the report and the page."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream import stage_progress
from millstream.cli import main
from millstream.termination import TERMINATION_LOG_VARIABLE
from millstream_operator.preparation.step_answers import failures_in_words, has_passed, read_step_answer
from millstream_operator.rendering.preparation_job import StepKind
from millstream_runtime.quality import comparison
from millstream_runtime.quality.summary import FIGURES, summary
from millstream_runtime.quality.token_scores import score
from tests.support.tiny_model import write_tiny_model
from tests.unit.quality.conftest import Change, noise, texts, write_data

pytestmark = pytest.mark.deep

Changed = Callable[[Change], Path]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "held_out.jsonl", texts(20, "chat") + texts(20, "code", seed=1))


def quality(base: Path, candidate: Path, data: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report."""
    saved = data.with_name("report.json")
    saved.unlink(missing_ok=True)
    code = main(["quality", str(base), str(candidate), f"--data={data}", f"--json={saved}", "--device=cpu", *flags])
    return code, json.loads(saved.read_text()) if saved.exists() else {}


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_a_model_is_judged_with_keys_and_values_in_8_bits(stored: str, base: Path, data: Path) -> None:
    """Weights are random, so nothing averages errors out, and FP8 has coarser numbers than the limits allow."""
    code, report = quality(base, base, data, f"--candidate-kv-cache-dtype={stored}")
    assert (code == 0) == (report["verdict"] == "passed")
    assert stored == "fp8" or code == 0
    assert [report[side]["kv_cache_dtype"] for side in ("base", "candidate")] == ["auto", stored]
    for one in report["slices"]:
        assert one["figures"]["mean_kl"]["value"] > 0, "nothing was quantized"
        assert one["figures"]["perplexity_ratio"]["value"] == pytest.approx(1, abs=0.02)


def test_a_job_that_is_deleted_ends_at_once(base: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of a container ignores SIGTERM where nothing handles it: its pod would end by SIGKILL."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(comparison, "compare", lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        with pytest.raises(SystemExit) as ended:
            quality(base, base, data)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143


def test_a_disk_that_is_full_at_the_end_does_not_take_the_verdict(
    base: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", str(base), str(base), f"--data={data}", "--json=/dev/full", "--device=cpu"]) == 1
    shown = capsys.readouterr()
    assert "Cannot write /dev/full: No space left on device." in shown.err
    assert shown.out.startswith("passed: ")


def test_a_log_shows_how_far_it_is(
    base: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a job in a cluster nobody sees a terminal."""
    monkeypatch.setattr(stage_progress, "LOG_SECONDS", 0.0)
    assert quality(base, base, data)[0] == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("quality: ")]
    assert any(line.endswith(" left") for line in lines)


@pytest.mark.quick
def test_a_model_passes_against_itself(base: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = quality(base, base, data)
    assert (code, report["verdict"]) == (0, "passed")
    for one in report["slices"]:
        figures = one["figures"]
        assert (figures["mean_kl"]["value"], figures["flip_percent"]["value"]) == (0, 0)
        assert figures["top1_agreement_percent"]["value"] == 100
        assert figures["num_tokens"] == 20 * 59
    assert "passed" in capsys.readouterr().out


@pytest.mark.quick
def test_a_document_that_is_in_the_file_twice_changes_no_figure(
    base: Path, changed: Changed, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each slice has 20 documents, and has no fewer and no more of them in a file that repeats them all."""
    candidate = changed(noise(0.02))
    twice = tmp_path / "twice.jsonl"
    twice.write_text(data.read_text() * 2)
    _, once = quality(base, candidate, data)
    _, repeated = quality(base, candidate, twice)
    assert repeated["slices"] == once["slices"]
    assert (once["data"]["documents_repeated"], repeated["data"]["documents_repeated"]) == (0, 40)
    assert "40 lines repeat another document and were left out" in capsys.readouterr().out


@pytest.mark.quick
def test_a_worse_model_fails_with_3_and_names_slice_and_figure(
    base: Path, changed: Changed, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = quality(base, changed(noise(0.5)), data)
    assert (code, report["verdict"]) == (3, "failed")
    assert not any(one["passes"] for one in report["slices"])
    assert "code failed: mean_kl" in capsys.readouterr().out
    assert len(report["worst_answers"]) == 5


def test_a_slice_that_is_strict_fails_the_model_alone(base: Path, changed: Changed, data: Path) -> None:
    candidate = changed(noise(0.02))
    _, report = quality(base, candidate, data)
    kl = {one["figures"]["slice"]: one["figures"]["mean_kl"]["value"] for one in report["slices"]}
    between = (kl["chat"] + kl["code"]) / 2
    others = [f"--max-p99-kl={99}", "--min-top1-agreement-percent=0", "--max-flip-percent=100"]
    code, report = quality(base, candidate, data, f"--max-mean-kl={between}", "--max-perplexity-ratio=9", *others)
    assert code == 3
    assert sorted(one["passes"] for one in report["slices"]) == [False, True]


def test_a_candidate_whose_logits_overflow_fails(base: Path, changed: Changed, data: Path) -> None:
    def overflow(name: str, weight: torch.Tensor) -> torch.Tensor:
        return weight * {"model.norm.weight": 1e35, "lm_head.weight": 1e5}.get(name, 1.0)

    code, report = quality(base, changed(overflow), data)
    assert code == 3
    assert "not finite" in report["slices"][0]["failures"][0]
    json.loads(json.dumps(report), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_page_shows_verdict_plot_and_answers_and_escapes_texts(
    base: Path, changed: Changed, tmp_path: Path
) -> None:
    lines = [{"prompt": f"<script>{n}", "completion": "x" * 60, "slice": "<b>"} for n in range(20)]
    data = write_data(tmp_path / "held_out.jsonl", lines)
    page = tmp_path / "report.html"
    quality(base, changed(noise(0.3)), data, f"--page={page}")
    text = page.read_text()
    assert "<polyline" in text
    assert "&lt;script&gt;" in text
    assert "<script>" not in text
    assert "<b>" not in text


@pytest.mark.quick
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-mean-kl=-1"], "--max-mean-kl is -1.0"),
        (["--max-mean-kl=nan"], "--max-mean-kl is nan"),
        (["--min-top1-agreement-percent=101"], "it must be 0 to 100"),
        (["--max-tokens=1"], "--max-tokens is 1; it must be 2"),
        (["--worst=-1"], "--worst is -1"),
        (["--json=/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--page=/tmp"], "--page is /tmp; that is a folder, give a file."),
        (["--workload=lax"], "invalid choice"),
        (["--dtype=half"], "choose from 'auto', 'float32', 'float16', 'bfloat16'"),
    ],
)
def test_a_flag_that_cannot_work_is_one_sentence(
    base: Path, data: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quality", str(base), str(base), f"--data={data}", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.quick
def test_models_that_are_not_two_forms_of_one_are_refused(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_tiny_model(tmp_path / "other", vocab_size=300)
    assert quality(base, other, data)[0] == 2
    assert "a vocabulary of 300" in capsys.readouterr().err
    twin = write_tiny_model(tmp_path / "twin")
    tokenizer = json.loads((twin / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (twin / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert quality(base, twin, data)[0] == 2
    assert "Line 1 becomes other tokens" in capsys.readouterr().err


def test_too_little_data_and_a_missing_folder_are_refused_before_weights_are_read(
    base: Path, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = write_data(tmp_path / "few.jsonl", texts(3))
    assert quality(base, base, few)[0] == 2
    assert "has 3 documents" in capsys.readouterr().err
    assert quality(base, tmp_path / "absent", data)[0] == 1
    assert "does not exist" in capsys.readouterr().err


def test_a_prompt_that_is_too_long_is_named_with_what_limits_it(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = write_data(tmp_path / "long.jsonl", [{"prompt": "a" * 200, "completion": "b"}])
    assert quality(base, base, long, "--max-tokens=100")[0] == 2
    assert "together have at most 100; shorten it or give a larger --max-tokens." in capsys.readouterr().err
    small = write_tiny_model(tmp_path / "small", max_position_embeddings=100)
    assert quality(small, small, long)[0] == 2
    assert capsys.readouterr().err.endswith("together have at most 100; shorten it.\n")


def test_data_that_is_gone_after_it_was_read_costs_no_verdict(
    base: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = hashlib.sha256(data.read_bytes()).hexdigest()

    def score_without_file(*given: Any) -> Any:
        data.unlink(missing_ok=True)
        return score(*given)

    monkeypatch.setattr("millstream_runtime.quality.streamed_scores.score", score_without_file)
    code, report = quality(base, base, data)
    assert (code, report["data"]["sha256"]) == (0, expected)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_report_takes_the_place_of_no_file_of_a_model(
    base: Path, changed: Changed, data: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    candidate = changed(noise(0.1))
    before = {path.name: path.read_bytes() for path in candidate.iterdir()}
    for flag in ("--json", "--page"):
        assert main(["quality", str(base), str(candidate), f"--data={data}", f"{flag}={candidate / name}"]) == 2
        assert f"{flag} is {candidate / name}, which is read; give another file." in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in candidate.iterdir()} == before
    for _ in range(2):  # a report of its own may lie there, and be replaced
        assert main(["quality", str(base), str(base), f"--data={data}", f"--json={candidate / 'quality.json'}"]) == 0


def test_ctrl_c_is_one_sentence(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("millstream_runtime.quality.comparison.stream_scores", interrupted)
    assert main(["quality", str(base), str(base), f"--data={data}", f"--json={tmp_path}/report.json"]) == 130
    assert capsys.readouterr().err == "millstream: interrupted\n"
    assert list(tmp_path.iterdir()) == [data], "no report"


def test_in_a_pod_verdict_and_figures_are_the_termination_message_that_the_operator_reads(
    base: Path, changed: Changed, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setenv(TERMINATION_LOG_VARIABLE, str(log))
    code, report = quality(base, changed(noise(0.5)), data)
    answer = read_step_answer(StepKind.JUDGE, log.read_text())
    assert code == 3
    assert isinstance(answer, dict)
    assert not has_passed(answer)
    assert {one["slice"] for one in answer["slices"]} == {"chat", "code"}
    figures = {one["figures"]["slice"]: one["figures"] for one in report["slices"]}
    for one in answer["slices"]:
        assert one["mean_kl"] == pytest.approx(figures[one["slice"]]["mean_kl"]["value"], rel=1e-4)
    assert "code: mean_kl" in failures_in_words(answer)


@pytest.mark.quick
def test_many_slices_stay_within_a_termination_message_and_those_that_failed_come_first() -> None:
    value = {name: {"value": 0.123456789} for name in FIGURES}
    slices = [
        {"figures": {"slice": f"slice-{i}", "num_documents": 20, "num_tokens": 1000, **value}, "failures": []}
        for i in range(200)
    ]
    slices[-1]["failures"] = ["mean_kl " + "9" * 1000]
    shards = [{"name": f"{i:0>200}", "size_bytes": 1 << 40, "sha256": "0" * 64, "is_whole": False} for i in range(200)]
    sides = {side: {"files": shards} for side in ("base", "candidate")}
    line = summary({"verdict": "failed", "slices": slices, "data": {"sha256": "0" * 64}, **sides})
    assert len(line.encode()) <= 4096
    answer = read_step_answer(StepKind.JUDGE, line)
    assert isinstance(answer, dict)
    assert answer["slices"][0]["slice"] == "slice-199"
    assert (answer["files"]["base"]["sampled"], len(answer["files"]["base"]["sampled_files"])) == (200, 3)
    assert len(answer["slices"]) + answer["slices_left_out"] == 200
