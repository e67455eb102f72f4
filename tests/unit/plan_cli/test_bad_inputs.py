"""`millstream plan` with flags that do not go together and with files that are damaged: one sentence, exit code 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream.cli import main
from tests.support.gpu_nodes import A100

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MID, DEMO = EXAMPLES / "mid.yaml", EXAMPLES / "demo.yaml"


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What is written to stderr: one line, and nothing to stdout."""
    code = main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (1, "", 1), captured
    assert captured.err.startswith("millstream: ")
    return captured.err


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((DEMO, "--draft-config", "x.json"), "--draft-config needs a spec that names speculation.draftModel"),
        ((MID, "--image", ""), "--image is empty"),
        ((MID, "--compare", "gpus", "-o", "manifests"), "exclude each other"),
        ((MID, "--kubeconfig", "x", "--diff", "--compare", "gpus"), "exclude each other"),
        ((MID, "--kubeconfig", "x", "--diff", "-o", "json"), "--diff has no -o json"),
        ((DEMO, "--compare", "gpus"), "accelerator.type is CPU, so there are no GPUs to compare"),
    ],
)
def test_a_flag_that_would_have_no_effect_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], said: str
) -> None:
    assert said in plan(capsys, *arguments)


def test_gpus_for_a_cpu_are_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(DEMO), str(MID), "--gpus", "A100-40GB:2"]) == 0
    assert capsys.readouterr().err == "demo: accelerator.type is CPU, so --gpus has no effect.\n"


NODE = {
    "kind": "Node",
    "metadata": {"name": "a", "labels": {"nvidia.com/gpu.product": A100}},
    "status": {"allocatable": {"nvidia.com/gpu": "2"}},
}
POD = {
    "kind": "Pod",
    "metadata": {"name": "a", "uid": "1"},
    "spec": {"nodeName": "a", "containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
}
ODD_NODES = (
    {**NODE, "metadata": {"name": "a", "labels": ["gpu"]}},
    {**NODE, "metadata": "a"},
    {**NODE, "status": "Ready"},
    {**NODE, "status": {"allocatable": {"nvidia.com/gpu": "2"}, "conditions": "Ready"}},
    {**NODE, "spec": "none"},
    {**NODE, "spec": {"taints": ["dedicated"]}},
)
ODD_PODS = (
    {**POD, "metadata": "a"},
    {**POD, "spec": {"nodeName": "a", "containers": ["c"]}},
    {**POD, "spec": {"nodeName": "a", "containers": [{"name": "c", "resources": "1"}]}},
)


@pytest.mark.parametrize("odd", ODD_NODES)
def test_a_node_that_kubectl_never_prints_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, odd: Any
) -> None:
    nodes = write(tmp_path / "nodes.json", json.dumps({"items": [NODE, odd]}))
    done = plan(capsys, MID, "--nodes", nodes)
    assert f"{nodes}: object 2 of 2" in done


@pytest.mark.parametrize("odd", ODD_PODS)
def test_a_pod_that_kubectl_never_prints_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, odd: Any
) -> None:
    nodes = write(tmp_path / "nodes.json", json.dumps({"items": [NODE]}))
    pods = write(tmp_path / "pods.json", json.dumps({"items": [odd]}))
    done = plan(capsys, MID, "--nodes", nodes, "--pods", pods)
    assert f"{pods}: object 1 of 1" in done


@pytest.mark.parametrize("flag", ["--nodes", "--catalog"])
@pytest.mark.parametrize(
    "text", ["a: 2026-13-45", "a: !!int ''", "a: !!bool maybe", "a: !!timestamp x", "a:\n\tb: 1", "[" * 5000]
)
def test_yaml_that_cannot_be_read_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str, text: str
) -> None:
    done = plan(capsys, MID, flag, write(tmp_path / "odd.yaml", text))
    assert f"{tmp_path / 'odd.yaml'}: " in done


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A100-40GB: {listPriceUSDPerHour: -1}", "A100-40GB: listPriceUSDPerHour is -1; it must be greater than or"),
        ("A100-40GB: {listPriceUSDPerHour: cheap}", "listPriceUSDPerHour is 'cheap'; it must be a valid number"),
        ("A100-40GB: {listPrice: 1}", "listPrice is no field of a GPU; did you mean listPriceUSDPerHour"),
        ("X9: {listPriceUSDPerHour: 1}", "X9: computeCapability is missing; a GPU that is not in the shipped"),
        ("L4-24GB: {listPriceUSDPerHour: 1}\nL4-24GB: {listPriceUSDPerHour: 2}", "L4-24GB is given twice"),
        ("a:\n\tb: 1", "line 2"),
    ],
)
def test_a_catalog_that_cannot_be_used_names_field_and_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str
) -> None:
    assert said in plan(capsys, MID, "--catalog", write(tmp_path / "catalog.yaml", text))


KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u, user: {}}]
current-context: c
"""
PLUGIN = "{exec: {apiVersion: client.authentication.k8s.io/v1, command: no-such-plugin, interactiveMode: Never}}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no kubeconfig"),
        ("just words", "holds no kubeconfig"),
        ("a:\n\tb: 1", "malformed YAML on line 2"),
        (KUBECONFIG, "the cluster's nodes cannot be listed: 127.0.0.1 does not answer: "),
        (KUBECONFIG.replace("user: {}", f"user: {PLUGIN}"), "No such file or directory: 'no-such-plugin'"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_says_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str
) -> None:
    assert said in plan(capsys, MID, "--kubeconfig", write(tmp_path / "config", text))
