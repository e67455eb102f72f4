"""`millstream plan` of a deployment on a CPU, without a cluster: what is missing, and the edit that would do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from millstream.cli import main

HEAD = """\
apiVersion: millstream.dev/v1alpha1
kind: LLMDeployment
metadata: {name: mine}
spec:
  accelerator: {type: CPU}
"""
LARGE = HEAD + "  model: {source: {huggingFace: {repository: meta-llama/Meta-Llama-3-8B-Instruct}}}\n"
AWQ = HEAD + "  model: {source: {huggingFace: {repository: casperhansen/llama-3-8b-instruct-awq}}}\n"


def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, *options: str) -> tuple[int, str]:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    code = main(["plan", str(path), *options])
    return code, capsys.readouterr().out


def edits(shown: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(shown)["fixes"]
    return found


def test_a_model_that_is_too_large_for_the_container_gets_the_memory_that_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = planned(tmp_path, capsys, LARGE)
    assert code == 2
    assert re.search(r"[0-9.]+ GiB are missing", shown)
    assert "podTemplate.spec.containers[runtime].resources.limits.memory: " in shown
    assert "kubectl patch llmd mine --type merge -p" in shown
    assert "No change" not in shown


def test_the_memory_that_is_offered_is_enough_and_a_gib_less_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, shown = planned(tmp_path, capsys, LARGE, "-o", "json")
    (fix, *_) = edits(shown)
    gib = int(fix["value"].removesuffix("Gi"))
    template = "  podTemplate: {{spec: {{containers: [{{name: runtime, resources: {{limits: {{memory: {}Gi}}}}}}]}}}}\n"
    assert planned(tmp_path, capsys, LARGE + template.format(gib))[0] == 0
    assert planned(tmp_path, capsys, LARGE + template.format(gib - 1))[0] == 2


def test_a_shorter_context_is_offered_where_the_weights_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = HEAD + "  model: {source: {huggingFace: {repository: meta-llama/Llama-3.2-1B-Instruct}}}\n"
    text += "  engine: {maxModelLen: 131072}\n"
    text += "  podTemplate: {spec: {containers: [{name: runtime, resources: {limits: {memory: 8Gi}}}]}}\n"
    code, shown = planned(tmp_path, capsys, text, "-o", "json")
    assert code == 2
    assert [fix["field"] for fix in edits(shown)][-1] == "engine.maxModelLen"


def test_a_format_that_the_checkpoint_is_not_stored_in_gets_the_edit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = planned(tmp_path, capsys, AWQ + "  quantization: {method: GPTQ}\n")
    assert code == 2
    assert "stored as AWQ" in shown
    assert "No change" not in shown or "lacks AWQ" in shown
