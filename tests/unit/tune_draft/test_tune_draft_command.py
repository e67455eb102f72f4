"""`millstream tune-draft` as a person types it: more drafts stand, other engines load it, bad input is one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from millstream.termination import TERMINATION_LOG_VARIABLE
from millstream_operator.preparation.step_answers import read_step_answer
from millstream_operator.rendering.preparation_job import StepKind
from millstream_runtime.config import Device, DType, RuntimeConfig
from millstream_runtime.quality.scored_model import ScoredModel
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from millstream_runtime.tune_draft.documents import Prompt
from millstream_runtime.tune_draft.target_answers import TargetModel
from millstream_runtime.tune_draft.target_sequence import TargetSequence
from millstream_runtime.tune_draft.tuning_report import summary
from tests.support.medusa_heads import write_medusa_heads
from tests.support.tiny_families import engine_answers, make_engine, prompts_of
from tests.support.tiny_model import write_tiny_model
from tests.unit.tune_draft.conftest import ENOUGH, contents, rows, tune

pytestmark = pytest.mark.deep

EAGLE_HEAD = Path(__file__).resolve().parents[3] / "models" / "demo-eagle"


@pytest.fixture(scope="module")
def tuned(target: Path, draft: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("tuned") / "tuned"
    assert tune(target, draft, data, out, *ENOUGH) == 0
    return out


def scored(folder: Path) -> ScoredModel:
    config = RuntimeConfig(
        model=str(folder), served_model_name="m", device=Device.CPU, dtype=DType.FLOAT32, max_model_len=64
    )
    return ScoredModel(config)


def test_more_drafts_stand_when_the_target_decodes(tuned: Path, target: Path, draft: Path) -> None:
    """Measured here once more, by prompts that no file holds."""
    tokenizer = Tokenizer.from_folder(target)
    prompts = [tokenizer.encode(str(row["prompt"])) for row in rows(90, seed=8) if "prompt" in row]
    answers = engine_answers(make_engine(target), prompts, 12)
    stood = {}
    for folder in (draft, tuned):
        model, count = scored(folder), 0
        for prompt, answer in zip(prompts, answers, strict=True):
            for slab in model.logits([*prompt, *answer], len(prompt)):
                count += int((slab.logits.argmax(-1) == torch.tensor(answer)).sum())
        stood[folder] = 100 * count / sum(map(len, answers))
    assert stood[tuned] > stood[draft] + 2


def test_the_report_says_so_by_slice(tuned: Path) -> None:
    report = json.loads((tuned / "tuning.json").read_text())
    assert (report["verdict"], report["reasons"]) == ("better", [])
    (found,) = report["slices"]
    assert found["slice"] == "all"
    assert found["answers"] == 40  # of 20 prompts, greedy and drawn
    points = found["gain_points"]
    assert points["value"] == pytest.approx(found["after"]["percent"] - found["before"]["percent"], abs=0.001)
    assert 0 < points["low"] < points["value"] < points["high"]
    assert found["after"]["accepted_tokens_per_check"] > found["before"]["accepted_tokens_per_check"]
    card = (tuned / "README.md").read_text()
    assert "**better**" in card
    assert f"{found['after']['percent']:.1f} %" in card


def test_the_folder_is_the_draft_with_other_weights(tuned: Path, draft: Path) -> None:
    assert json.loads((tuned / "config.json").read_text()) == json.loads((draft / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tuned / name).read_bytes() == (draft / name).read_bytes()
    before, after = (load_file(folder / "model.safetensors") for folder in (draft, tuned))
    assert {name: (one.shape, one.dtype) for name, one in before.items()} == {
        name: (one.shape, one.dtype) for name, one in after.items()
    }
    assert not any(torch.equal(before[name], after[name]) for name in before if name.endswith("proj.weight"))
    assert [path.name for path in tuned.parent.iterdir()] == [tuned.name]  # nothing of the work is left


def test_transformers_and_the_runtime_load_it_alike(tuned: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.float32)
    ids = prompts_of([24])[0]
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0, :-1]
    (ours,) = scored(tuned).logits(ids, 1)
    assert torch.allclose(ours.logits, theirs, atol=1e-4)


@pytest.mark.quick
def test_a_draft_that_does_not_gain_is_made_and_the_exit_code_is_3(
    target: Path, draft: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--steps=2", "--learning-rate=1e-9", "--temperature=0")
    assert tune(target, draft, data, tmp_path / "out", *flags) == 3
    report = json.loads((tmp_path / "out/tuning.json").read_text())
    assert report["verdict"] == "not better"
    assert report["settings"]["steps"] == 0  # no step is better than the draft was: its weights stay
    assert (tmp_path / "out/model.safetensors").stat().st_size
    before, after = (load_file(folder / "model.safetensors") for folder in (draft, tmp_path / "out"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "gained 0.00 points" in capsys.readouterr().out


def test_in_a_pod_the_verdict_is_the_termination_message_also_of_a_folder_that_is_there(
    target: Path, draft: Path, data: Path, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, out = tmp_path / "termination-log", tmp_path / "made"
    log.touch()
    monkeypatch.setenv(TERMINATION_LOG_VARIABLE, str(log))
    given = ("--steps=2", "--learning-rate=1e-9", "--temperature=0", "--keep-made")
    assert tune(target, draft, data, out, *given) == 3
    first, before = log.read_text(), contents(out)
    log.write_text("")
    assert tune(target, draft, data, out, *given) == 3, "an attempt whose answer was lost is made up for"
    assert (log.read_text(), contents(out)) == (first, before)
    assert tune(target, draft, data, tuned, "--keep-made") == 0
    for folder, text in ((out, first), (tuned, log.read_text())):
        report, answer = json.loads((folder / "tuning.json").read_text()), read_step_answer(StepKind.TUNE, text)
        assert isinstance(answer, dict)
        assert (answer["verdict"], answer["reasons"]) == (report["verdict"], report["reasons"])
        assert answer["slices"][0]["after_percent"] == report["slices"][0]["after"]["percent"]


def test_only_better_leaves_the_report_alone_and_answers_from_it_until_the_inputs_change(
    target: Path, draft: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    log, out, work = tmp_path / "termination-log", tmp_path / "out", tmp_path / ".out.tune-draft"
    log.touch()
    monkeypatch.setenv(TERMINATION_LOG_VARIABLE, str(log))
    given = ("--steps=2", "--learning-rate=1e-9", "--temperature=0", "--only-better", "--discard-other-work")
    assert tune(target, draft, data, out, *given) == 3
    assert f"did not make {out}: not better" in capsys.readouterr().out
    said = log.read_text()
    assert json.loads(said)["verdict"] == "not better"
    assert sorted(contents(work)) == ["job.json", "not-better.json"], "no weights, no answers, no lock"
    assert not out.exists()

    monkeypatch.setattr(TargetModel, "answers", _refuse)
    log.write_text("")
    (work / "model").mkdir()
    (work / "model/config.json").write_text("{}")  # a process that died while it removed them
    assert tune(target, draft, data, out, *given) == 3
    assert (log.read_text(), sorted(contents(work))) == (said, ["job.json", "not-better.json"])
    with pytest.raises(AssertionError, match="the target answers"):
        tune(target, draft, data, out, *given, "--seed=1")
    assert "of a run with another seed: it is discarded" in capsys.readouterr().err


def _refuse(self: TargetModel, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[TargetSequence]:
    raise AssertionError("the target answers")


@pytest.mark.quick
def test_a_report_that_is_none_is_one_sentence(
    target: Path, draft: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    for text in ("{}", "[]", "no JSON", '{"verdict": "better", "slices": [1], "reasons": []}'):
        (tmp_path / "out/tuning.json").write_text(text)
        assert tune(target, draft, data, tmp_path / "out", "--keep-made") == 2
        error = capsys.readouterr().err
        assert "is no report of `millstream tune-draft`; remove that folder" in error
        assert error.count("\n") == 1


@pytest.mark.quick
def test_the_summary_fits_a_termination_message_however_many_slices_there_are() -> None:
    figures = {"answers": 40, "before": {"percent": 1.5}, "after": {"percent": 2.5}}
    slices = [{"slice": "s" * 60, **figures, "gain_points": {"value": float(number)}} for number in range(60)]
    found = json.loads(summary({"verdict": "better", "reasons": ["r" * 999] * 9, "slices": slices}))
    assert len(json.dumps(found)) <= 4096
    assert found["slices"][0]["gain_points"] == 0.0, "those that lost most come first"
    assert found["slices_left_out"] == 60 - len(found["slices"]) > 0


@pytest.mark.quick
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps=0"], "--steps is 0; it must be 1 to"),
        (["--minutes=0"], "--minutes is 0"),
        (["--minutes=1", "--steps=2"], "--steps and --minutes both bound the training"),
        (["--learning-rate=nan"], "--learning-rate is nan"),
        (["--temperature=-1"], "--temperature is -1"),
        (["--draft-tokens=17"], "--draft-tokens is 17; it must be 1 to 16"),
        (["--max-answer-tokens=48"], "--max-answer-tokens is 48, and prompt and answer together have 48"),
        (["--general=/nowhere.jsonl"], "Cannot read --general /nowhere.jsonl"),
        (["--held-out=/nowhere.jsonl"], "Cannot read --held-out /nowhere.jsonl"),
    ],
)
def test_a_flag_that_cannot_work_is_one_sentence(
    target: Path, draft: Path, data: Path, tmp_path: Path, flags: list[str], words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert tune(target, draft, data, tmp_path / "out", *flags) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_two_models_that_are_no_pair_are_refused(
    target: Path, draft: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, larger = tmp_path / "out", write_tiny_model(tmp_path / "larger", num_hidden_layers=3)
    assert tune(target, larger, data, out) == 2
    assert "a draft must be smaller" in capsys.readouterr().err
    assert tune(target, target, data, out) == 2
    assert f"TARGET and DRAFT are both {target}: a draft must be a smaller model" in capsys.readouterr().err
    assert tune(target, EAGLE_HEAD, data, out) == 2
    assert f"{EAGLE_HEAD} is a draft head (EAGLE-1); this version quantizes and tunes whole" in capsys.readouterr().err
    assert tune(target, tmp_path / "absent", data, out) == 1
    assert "does not exist" in capsys.readouterr().err
    other = shutil.copytree(draft, tmp_path / "other")
    swapped = str.maketrans("ab", "ba")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token.translate(swapped): number for token, number in vocabulary.items()}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert tune(target, other, data, out) == 2
    assert "becomes other tokens in the draft than in the target" in capsys.readouterr().err
    assert not out.exists()


def test_heads_whose_config_names_no_architecture_are_named_too(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = write_medusa_heads(tmp_path / "heads")
    assert tune(target, heads, data, tmp_path / "out") == 2
    assert f"{heads} is a draft head (Medusa); this version quantizes and tunes whole" in capsys.readouterr().err


@pytest.mark.quick
def test_an_output_folder_that_holds_something_is_refused(
    target: Path, draft: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    assert tune(target, draft, data, tmp_path / "out") == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "notes.txt"]
