"""`millstream plan` as a person uses it: what it prints, how it ends, and one sentence for what it cannot use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream.cli import main
from millstream_operator.api.load import load_manifest
from tests.support.gpu_nodes import A100, L4, T4, gpu_node, gpu_pod
from tests.support.tiny_model import write_tiny_model
from tests.unit.operator.planning.cases import CASES

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
ENTERPRISE_GPUS = ("--gpus", "H200:8") * 3
GOLDEN = ROOT / "tests/unit/operator/planning/golden"
LOCAL = """\
apiVersion: millstream.dev/v1alpha1
kind: LLMDeployment
metadata: {name: mine}
spec:
  model: {source: {local: {path: tiny}}}
"""


class Ended:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def millstream(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("MILLSTREAM_TERMINATION_LOG", str(tmp_path / "none"))
    monkeypatch.setenv("MILLSTREAM_MODELS_DIR", str(tmp_path / "models"))

    def run(*arguments: object) -> Ended:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("tier", ["startup", "mid", "enterprise"])
def test_the_example_of_each_tier_is_valid_and_plans(millstream: Any, tier: str) -> None:
    assert load_manifest(EXAMPLES / f"{tier}.yaml").spec.tier == tier.capitalize()
    done = millstream("plan", EXAMPLES / f"{tier}.yaml")
    assert done.code == 0
    for part in (f"{tier}: ", "memory of one ", "KV cache ", "█", " a month", "  why\n"):
        assert part in done.out
    assert "Not applicable yet." not in done.out
    assert "\x1b" not in done.out, "no colour without a terminal"
    assert done.err == ""


def test_the_table_of_two_small_gpus_is_complete(millstream: Any) -> None:
    done = millstream("plan", EXAMPLES / "mid.yaml", "--gpus", "A100-40GB:2")
    assert "mid: 2×A100-40GB TP2 AWQ" in done.out
    assert "maxNumBatchedTokens 32768" in done.out
    assert "1×A100-40GB TP1 AWQ" in done.out.split("rejected")[1]
    assert "DraftModel, 5 tokens" in done.out


def test_json_is_what_the_status_holds(millstream: Any, tmp_path: Path) -> None:
    case = CASES["8b-awq-startup-a100-40gb"]
    spec = case.deployment().spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    manifest = {
        "apiVersion": "millstream.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "case"},
        "spec": spec,
    }
    file = write(tmp_path / "case.yaml", yaml.safe_dump(manifest))
    done = millstream("plan", file, "--gpus", case.gpus[0], "-o", "json", "--ignore-runtime-limits")
    printed, golden = json.loads(done.out), json.loads((GOLDEN / "8b-awq-startup-a100-40gb.json").read_text())
    assert printed.keys() == golden.keys() | {"factsHash"}
    without = [key for key in golden if key != "requires"]  # what this runtime lacks changes with it
    assert [printed[key] for key in without] == [golden[key] for key in without]


def test_what_autoscaling_may_cost_is_seen_before_it_is_applied(millstream: Any, tmp_path: Path) -> None:
    manifest = yaml.safe_load((EXAMPLES / "startup.yaml").read_text())
    manifest["spec"]["autoscaling"] = {"maxReplicas": 3}
    done = millstream(
        "plan", write(tmp_path / "m.yaml", yaml.safe_dump(manifest)), "--gpus", "A100-40GB:1", "-o", "json"
    )
    plan = json.loads(done.out)
    reasons = {one["field"]: one["reason"] for one in plan["reasons"]}
    at_most = plan["cost"]["monthlyUSD"] * 3 // plan["replicas"]
    assert f"Up to 3 replicas: ${at_most:,} a month at most" in reasons["autoscaling.maxReplicas"]


def test_infeasible_ends_with_2_and_says_what_would_do(millstream: Any, tmp_path: Path) -> None:
    spec = "  model: {source: {huggingFace: {repository: meta-llama/Llama-3.1-8B-Instruct}}}\n"
    head = "apiVersion: millstream.dev/v1alpha1\nkind: LLMDeployment\nmetadata: {name: chat, namespace: team}\nspec:\n"
    path = write(tmp_path / "chat.yaml", f"{head}{spec}  engine: {{maxModelLen: 65536}}\n")
    done = millstream("plan", path, "--gpus", "L4:1")
    assert done.code == 2
    assert "Infeasible: memory" in done.out
    edits, gpus = done.out.split("  GPUs to add that would do\n")
    assert "  edits of the spec that would do\n" in edits
    patch = """kubectl patch llmd chat -n team --type merge -p '{"spec":{"engine":{"maxModelLen":31744}}}'"""
    assert patch in edits
    assert "gpus: L4-24GB:4 " in gpus
    assert "kubectl" not in gpus
    found = json.loads(millstream("plan", path, "--gpus", "L4:1", "-o", "json").out)
    assert found["fixes"][0]["patch"] == '{"spec":{"engine":{"maxModelLen":31744}}}'


def test_a_plan_that_this_version_cannot_apply_ends_with_2(millstream: Any, tmp_path: Path) -> None:
    spec = "  model: {source: {huggingFace: {repository: meta-llama/Meta-Llama-3-8B-Instruct}}}\n"
    head = "apiVersion: millstream.dev/v1alpha1\nkind: LLMDeployment\nmetadata: {name: chat}\nspec:\n"
    path = write(tmp_path / "chat.yaml", f"{head}{spec}  parallelism: {{tensor: 1, pipeline: 2}}\n")
    done = millstream("plan", path, "--gpus", "L4:1", "--gpus", "L4:1")
    assert (done.code, "(pipelineParallelSize=2)" in done.out) == (2, True)


def test_what_no_change_helps_says_what_this_version_lacks(millstream: Any, tmp_path: Path) -> None:
    """A family that can be planned, and not run."""
    sizes = {"num_hidden_layers": 60, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32_000}
    family = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "torch_dtype": "bfloat16"}
    shape = {"hidden_size": 8192, "intermediate_size": 28_672, "head_dim": 128, "max_position_embeddings": 8192}
    config = write(tmp_path / "config.json", json.dumps(family | sizes | shape))
    unknown = write(tmp_path / "unknown.yaml", UNKNOWN)
    done = millstream("plan", unknown, "--config", config, "--gpus", "L4:1", "-o", "json")
    assert done.code == 2
    found = json.loads(done.out)
    assert (found["fixes"], found["requires"]) == ([], ["modelFamily=gemma"])
    assert "It would fit as " in found["reasons"][0]["reason"]


def test_several_files_end_with_the_worst(millstream: Any) -> None:
    done = millstream("plan", EXAMPLES / "startup.yaml", EXAMPLES / "mid.yaml", "--gpus", "L4:1", "-o", "json")
    assert done.code == 2
    assert [plan["feasible"] for plan in json.loads(done.out)] == [True, False]


def test_nodes_of_a_cluster(millstream: Any, tmp_path: Path) -> None:
    def node(name: str, product: str, gpus: int) -> dict[str, Any]:
        return {
            "kind": "Node",
            "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": product}},
            "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}},
        }

    items = [
        node("a", "NVIDIA-A100-SXM4-40GB", 2),
        node("b", "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", 7),
        node("c", "Tesla-T4", 1),
    ]
    for name, text in (("nodes.yaml", yaml.safe_dump({"items": items})), ("nodes.json", json.dumps({"items": items}))):
        done = millstream("plan", EXAMPLES / "mid.yaml", "--nodes", write(tmp_path / name, text), "-o", "json")
        assert done.code == 0
        assert json.loads(done.out)["summary"] == "2×A100-40GB TP2 AWQ"
        assert "Node b is left out" in done.err


def test_planning_from_files_loads_no_client_of_a_cluster() -> None:
    code = (
        "import sys, millstream.plan_inputs as _; sys.exit(bool({'kopf', 'kubernetes', 'aiohttp'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


ONE_GPU = """
apiVersion: millstream.dev/v1alpha1
kind: LLMDeployment
metadata: {name: small, namespace: team}
spec:
  model: {source: {huggingFace: {repository: meta-llama/Llama-3.2-1B-Instruct}}}
"""


def planned_on(millstream: Any, folder: Path, nodes: list[Any], pods: list[Any] | None = None, spec: str = "") -> Any:
    """The plan as JSON, and what was said about nodes."""
    words = ["plan", write(folder / "small.yaml", ONE_GPU + spec), "-o", "json"]
    words += ["--nodes", write(folder / "nodes.yaml", yaml.safe_dump({"items": nodes}))]
    if pods is not None:
        words += ["--pods", write(folder / "pods.yaml", yaml.safe_dump({"kind": "List", "items": pods}))]
    done = millstream(*words)
    return json.loads(done.out), done.err


def test_a_tainted_node_is_left_out_unless_the_pods_tolerate_it(millstream: Any, tmp_path: Path) -> None:
    taints = [{"key": "dedicated", "value": "x", "effect": "NoSchedule"}]
    nodes = [gpu_node("cheap", T4, 4, taints=taints), gpu_node("mine", L4, 1)]
    plan, said = planned_on(millstream, tmp_path, nodes)
    assert plan["accelerator"] == "L4-24GB"
    left_out = "Node cheap is left out: the pods do not tolerate the taint dedicated=x:NoSchedule."
    assert left_out in said
    assert left_out in [reason["reason"] for reason in plan["reasons"] if reason["field"] == "nodes"]
    tolerant = "  podTemplate: {spec: {tolerations: [{key: dedicated, operator: Exists}]}}"
    assert planned_on(millstream, tmp_path, nodes, spec=tolerant)[0]["accelerator"] == "T4-16GB"


@pytest.mark.parametrize("state", ["cordoned", "not Ready"])
def test_a_node_that_takes_no_pods_now_is_waited_for_as_in_the_cluster(
    millstream: Any, tmp_path: Path, state: str
) -> None:
    node = gpu_node("away", L4, 1, unschedulable=state == "cordoned")
    if state == "not Ready":
        node["status"]["conditions"][0]["status"] = "Unknown"
    plan, said = planned_on(millstream, tmp_path, [node])
    assert plan["accelerator"] == "L4-24GB"
    assert any("pods wait" in reason["reason"] for reason in plan["reasons"] if reason["field"] == "inventory")
    assert f"Node away is left out: {state}." in said


def test_gpus_that_running_pods_hold_are_not_free_and_the_own_pods_are(millstream: Any, tmp_path: Path) -> None:
    nodes = [gpu_node("a", T4, 1), gpu_node("b", L4, 1)]
    theirs = gpu_pod("theirs", "a")
    assert planned_on(millstream, tmp_path, nodes)[0]["accelerator"] == "T4-16GB"
    plan, _ = planned_on(millstream, tmp_path, nodes, [theirs])
    assert (plan["accelerator"], plan["preferred"]) == ("L4-24GB", plan["preferred"])
    own = gpu_pod("own", "a", 1, **{"millstream.dev/deployment": "small"})
    assert planned_on(millstream, tmp_path, nodes, [own])[0]["accelerator"] == "T4-16GB"
    over = gpu_pod("over", "a")
    over["status"]["phase"] = "Succeeded"
    assert planned_on(millstream, tmp_path, nodes, [over])[0]["accelerator"] == "T4-16GB"


def test_a_plan_from_the_spec_alone_names_the_replicas_and_why_no_node_counts(millstream: Any, tmp_path: Path) -> None:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["x"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    spec = yaml.safe_load(LOCAL)
    spec["spec"] = {
        "model": {"source": {"huggingFace": {"repository": "meta-llama/Llama-3.2-1B-Instruct"}}},
        "podTemplate": {"spec": {"affinity": {"nodeAffinity": required}}},
    }
    nodes = write(tmp_path / "n.yaml", yaml.safe_dump({"items": [gpu_node("a", L4, 1), gpu_node("b", L4, 1)]}))
    done = millstream("plan", write(tmp_path / "m.yaml", yaml.safe_dump(spec)), "--nodes", nodes)
    assert "None" not in done.out
    assert "as in spec.replicas" in done.out
    said = " ".join(done.out.split())
    assert "Nodes a, b are left out: the pods' required node affinity is not met: zone In (x)." in said


def test_nodes_that_cannot_be_planned_on_are_a_verdict_with_their_reasons(millstream: Any, tmp_path: Path) -> None:
    unlabelled = gpu_node("gpu-1", A100, 8)
    unlabelled["metadata"]["labels"] = {}
    large = write(tmp_path / "mid.yaml", ONE_GPU.replace("Llama-3.2-1B-Instruct", "Meta-Llama-3-70B-Instruct"))
    done = millstream("plan", large, "--nodes", write(tmp_path / "n.yaml", yaml.safe_dump({"items": [unlabelled]})))
    assert done.code == 2
    assert "Node gpu-1 is left out: no label nvidia.com/gpu.product" in " ".join(done.out.split())


def test_a_local_model_is_read_from_its_folder_and_its_manifests_are_those_of_the_operator(
    millstream: Any, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "models" / "tiny")
    file = write(tmp_path / "mine.yaml", LOCAL)
    done = millstream("plan", file, "--gpus", "L4:1", "-o", "manifests", "--image", "registry.example.com/runtime:1")
    assert done.code == 0, done.err
    documents = list(yaml.safe_load_all(done.out))
    assert [document["kind"] for document in documents][-1] == "Deployment"
    pod = documents[-1]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "registry.example.com/runtime:1"
    assert "NVIDIA-L4" in json.dumps(pod["affinity"])
    assert not any("ownerReferences" in document["metadata"] for document in documents)


def test_the_demo_on_a_cpu_has_a_ledger(millstream: Any, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "models" / "tiny")
    file = write(tmp_path / "mine.yaml", LOCAL + "  accelerator: {type: CPU}\n")
    done = millstream("plan", file, "-o", "json")
    assert done.code == 0
    memory = json.loads(done.out)["memory"]
    assert memory["usableBytes"] == 4 << 30 == sum(memory.values()) - memory["usableBytes"]


@pytest.mark.parametrize(
    ("axis", "names"),
    [
        ("tiers", ["Startup", "Mid", "Enterprise"]),
        ("gpus", ["A100-40GB", "H100-80GB"]),
        ("quantizations", ["AWQ"]),
    ],
)
def test_side_by_side(millstream: Any, axis: str, names: list[str]) -> None:
    arguments = ("plan", EXAMPLES / "mid.yaml", "--gpus", "A100-40GB:2", "--gpus", "H100:8", "--compare", axis)
    table = millstream(*arguments)
    assert table.code == 0
    for name in names:
        assert name in table.out
    assert [row["name"] for row in json.loads(millstream(*arguments, "-o", "json").out)] == names


def test_what_a_gpu_holds_at_once_is_in_the_comparison(millstream: Any) -> None:
    """Of two GPUs one may be faster and hold fewer requests: the numbers are those of each plan."""
    arguments = ("plan", EXAMPLES / "mid.yaml", "--gpus", "A100-40GB:2", "--gpus", "H100:8", "--compare", "gpus")
    rows = json.loads(millstream(*arguments, "-o", "json").out)
    header, *lines = millstream(*arguments).out.splitlines()[2:5]
    start, end = header.index("at once"), header.index("ITL ms")
    shown = [int(line[:end].split()[-1]) for line in lines]
    assert start < end
    assert shown == [row["predicted"]["concurrentSequences"] for row in rows]


def test_own_prices(millstream: Any, tmp_path: Path) -> None:
    prices = write(tmp_path / "prices.yaml", "A100-40GB: {listPriceUSDPerHour: 1.0}\n")
    done = millstream("plan", EXAMPLES / "mid.yaml", "--gpus", "A100-40GB:2", "--catalog", prices, "-o", "json")
    assert json.loads(done.out)["cost"]["hourlyMilliUSD"] == 2000


BAD: dict[str, tuple[list[str], str]] = {
    "no file": (["plan"], "FILE"),
    "missing file": (["plan", "no-such.yaml"], "no-such.yaml"),
    "unknown option": (["plan", "{mid}", "--gpu", "L4:1"], "--gpu"),
    "unknown GPU": (["plan", "{mid}", "--gpus", "L9:1"], "'L9' is not in the catalogue"),
    "no count": (["plan", "{mid}", "--gpus", "L4:none"], "NAME:COUNT"),
    "two inventories": (["plan", "{mid}", "--gpus", "L4", "--nodes", "x"], "not allowed with"),
    "no nodes file": (["plan", "{mid}", "--nodes", "no-nodes.yaml"], "no-nodes.yaml: cannot be read"),
    "pods without nodes": (["plan", "{mid}", "--pods", "pods.yaml"], "--pods needs --nodes"),
    "nodes that are none": (["plan", "{mid}", "--nodes", "{mid}"], "holds no nodes"),
    "no kubeconfig": (["plan", "{mid}", "--kubeconfig", "no-config"], "no-config"),
    "no folder": (["plan", "{local}"], "MILLSTREAM_MODELS_DIR"),
    "unknown repository": (["plan", "{unknown}"], "give its config.json with --config"),
    "config that is none": (["plan", "{unknown}", "--config", "{mid}"], "not a JSON file"),
    "manifests of what cannot run": (
        ["plan", "{enterprise}", *ENTERPRISE_GPUS, "-o", "manifests"],
        "quantization=INT8",
    ),
    "manifests of nothing": (["plan", "{mid}", "--gpus", "L4:1", "-o", "manifests"], "infeasible"),
    "prices that are none": (["plan", "{mid}", "--catalog", "{local}"], "GPU catalogue"),
    "not a manifest": (["plan", "{pyproject}"], "pyproject.toml"),
}
UNKNOWN = LOCAL.replace("local: {path: tiny}", "huggingFace: {repository: nobody/nothing}")


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_one_sentence_and_exit_code_1(millstream: Any, tmp_path: Path, name: str) -> None:
    enterprise = (EXAMPLES / "enterprise.yaml").read_text(encoding="utf-8")
    files = {
        "mid": EXAMPLES / "mid.yaml",
        "enterprise": write(tmp_path / "int8.yaml", enterprise.replace("method: FP8", "method: INT8")),
        "local": write(tmp_path / "local.yaml", LOCAL),
        "unknown": write(tmp_path / "unknown.yaml", UNKNOWN),
        "pyproject": ROOT / "pyproject.toml",
    }
    arguments, said = BAD[name]
    done = millstream(*(argument.format(**files) for argument in arguments))
    assert done.code == 1, done.out
    assert said in done.err
    assert done.err.startswith("millstream: ")
    assert done.err.count("\n") == 1
    assert done.out == ""


def test_serving_what_cannot_be_run_is_refused_by_name(millstream: Any) -> None:
    done = millstream("serve", EXAMPLES / "startup.yaml")
    assert done.code == 1
    assert "millstream fetch --hugging-face casperhansen/llama-3-8b-instruct-awq" in done.err
