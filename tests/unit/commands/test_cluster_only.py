"""`millstream serve` of an LLMDeployment says what it leaves to the operator, and what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream_runtime.config import DEFAULT_MODEL_DRAFT_TOKENS, RuntimeConfig, SpeculationMethod
from millstream_runtime.errors import RuntimeFailure
from tests.support.command_line import config_from_command_line
from tests.support.llmdeployments import manifest

DATASET = {"configMapRef": {"name": "documents", "key": "a.jsonl"}}
CACHED = {"source": {"local": {"path": "demo-chat"}}, "cache": {"size": "10Gi"}}
GATE = {"qualityGate": {"dataset": DATASET, "base": {"local": {"path": "base"}}}}
TUNED = {"draftModel": {"source": {"local": {"path": "demo-draft"}}}, "tuning": {"dataset": DATASET}}


def served(folder: Path, **spec: Any) -> RuntimeConfig:
    file = folder / "chat.yaml"
    file.write_text(yaml.safe_dump(manifest(**spec)))
    return config_from_command_line([str(file)])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"quantization": GATE},
            "spec.quantization.qualityGate needs the operator and has no effect here; run `millstream quality` "
            "instead.",
        ),
        (
            {"model": CACHED, "speculation": TUNED},
            "spec.speculation.tuning needs the operator and has no effect here; run `millstream tune-draft` instead.",
        ),
        (
            {"model": CACHED, "quantization": GATE, "speculation": TUNED},
            "spec.quantization.qualityGate and spec.speculation.tuning need the operator and have no effect here; run "
            "`millstream quality` and `millstream tune-draft` instead.",
        ),
    ],
)
def test_jobs_of_the_operator_are_named_once_and_the_model_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: dict[str, Any], said: str
) -> None:
    without = {name: value for name, value in spec.items() if name != "quantization"}
    config = served(tmp_path, **spec)
    assert capsys.readouterr().err == f"{tmp_path}/chat.yaml: {said}\n"
    assert config == served(tmp_path, **without), "as it is served without a gate"


def test_a_spec_that_needs_no_operator_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served(tmp_path, replicas=3, service={"port": 8080})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"model": {"source": {"image": {"reference": "registry.example.com/model:1"}}}},
            "spec.model.source.image is downloaded in a pod; here run `millstream fetch --image "
            "registry.example.com/model:1 --into FOLDER`",
        ),
        (
            {"model": {"source": {"huggingFace": {"repository": "org/name"}}}},
            "run `millstream fetch --hugging-face org/name --into FOLDER`, then `millstream serve FOLDER`.",
        ),
        (
            {"model": CACHED, "quantization": {"method": "AWQ", "calibration": DATASET}},
            "`millstream quantize FOLDER --method awq --calibration FILE --out OUT`, then `millstream serve OUT`.",
        ),
    ],
)
def test_weights_that_only_a_cluster_has_are_refused_with_the_command(
    tmp_path: Path, spec: dict[str, Any], said: str
) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        served(tmp_path, **spec)
    assert said in caught.value.message
    assert caught.value.message.startswith(f"{tmp_path}/chat.yaml: spec.")


def test_medusa_heads_have_the_number_of_drafts_that_the_page_says(tmp_path: Path) -> None:
    heads = {"method": "Medusa", "draftModel": {"source": {"local": {"path": "heads"}}}}
    of_a_spec = served(tmp_path, speculation=heads)
    of_flags = config_from_command_line(
        ["--model=m", f"--speculation-method={SpeculationMethod.MEDUSA}", "--draft-model=heads"]
    )
    assert (of_a_spec.draft_tokens, of_flags.draft_tokens) == (4, DEFAULT_MODEL_DRAFT_TOKENS)
    page = (Path(__file__).resolve().parents[3] / "docs/speculation.md").read_text()
    assert "a spec proposes 4 tokens by default, and `millstream serve` with flags 5" in page
