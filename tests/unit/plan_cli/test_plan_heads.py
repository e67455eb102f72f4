"""`millstream plan` of a model with a draft head: the example, and one sentence for what is no head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from millstream.cli import main

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples/eagle.yaml"


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_MODELS_DIR", str(ROOT / "models"))


def changed(tmp_path: Path, before: str, after: str) -> Path:
    text = EXAMPLE.read_text()
    assert before in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(before, after))
    return path


def test_the_example_counts_the_demo_head(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLE)]) == 0
    shown = capsys.readouterr().out
    assert "EAGLE, 5 tokens" in shown
    assert "draft head" in shown
    assert main(["plan", str(EXAMPLE), "-o", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    weights_bytes = (ROOT / "models/demo-eagle/model.safetensors").stat().st_size * 2  # bfloat16, served in float32
    assert plan["memory"]["draftWeightsBytes"] == pytest.approx(weights_bytes, rel=0.01)
    assert plan["requires"] == []


def test_the_manifests_of_the_example_name_the_head(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLE), "-o", "manifests"]) == 0
    data = [one.get("data") or {} for one in yaml.safe_load_all(capsys.readouterr().out)]
    (boot,) = [json.loads(one["boot.json"]) for one in data if "boot.json" in one]
    assert (boot["speculation_method"], boot["draft_model"]) == ("EAGLE", "/models/demo-eagle")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("path: demo-eagle", "path: demo-draft", "the weights are those of no EAGLE head"),
        ("method: EAGLE ", "method: Medusa ", "or set speculation.method to EAGLE."),
        ("path: demo-eagle", "path: none", "none does not exist"),
        (
            "local:\n          path: demo-eagle",
            "huggingFace:\n          repository: org/head",
            "give the config.json in a folder of the head with --draft-config.",
        ),
    ],
)
def test_what_is_no_head_here_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str, after: str, said: str
) -> None:
    assert main(["plan", str(changed(tmp_path, before, after))]) == 1
    assert said in capsys.readouterr().err


def test_a_head_of_a_hub_is_planned_by_a_folder_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = changed(tmp_path, "local:\n          path: demo-eagle", "huggingFace:\n          repository: org/head")
    assert main(["plan", str(path), "--draft-config", str(ROOT / "models/demo-eagle/config.json")]) == 0
    assert "draft head" in capsys.readouterr().out
