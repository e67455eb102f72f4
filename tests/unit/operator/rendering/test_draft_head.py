"""A draft head is inspected as a head, pinned, fetched, and rendered into a configuration that the runtime accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.catalog.inspected_model import read_answer, read_inspected, read_inspected_head
from millstream_operator.facts.inspection import subjects
from millstream_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT, JOB, POD
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.inspected import Inspected
from millstream_operator.planning.plan import Plan, PlanDefaults
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.rendering.alerts import alerts
from millstream_operator.rendering.inspect_job import Subject, inspection_key
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.pod_template import pod_template
from millstream_operator.rendering.runtime_config import boot_config, live_config
from millstream_runtime.config import GovernorMode, RuntimeConfig, SpeculationMethod
from millstream_runtime.config_files import dump, parse_boot
from tests.support.fake_operator import FakeOperator, answer_of, respec, world
from tests.support.inspected_heads import head_answer, head_message
from tests.support.llmdeployments import deployment, manifest
from tests.support.runtime_args import from_args, to_args

DEFAULTS = PlanDefaults("runtime:1")
TARGET, HEAD = "a" * 40, "b" * 40
SIZES = {"hidden_size": 256, "vocab_size": 2048, "num_hidden_layers": 5, "intermediate_size": 768}
HUB: dict[str, Any] = {"huggingFace": {"repository": "org/target"}}
HEAD_HUB: dict[str, Any] = {"huggingFace": {"repository": "org/head"}}
CACHE = {"size": "20Gi"}


def spec(source: dict[str, Any], method: str = "EAGLE", **speculation: Any) -> dict[str, Any]:
    drafts = {"method": method, "draftModel": {"source": source}} | speculation
    return {"model": {"source": HUB}, "speculation": drafts}


def planned(kind: str = "EAGLE-1", **fields: Any) -> Plan:
    method = "Medusa" if kind == "Medusa" else "EAGLE"
    found = Inspected(
        read_inspected(read_answer(answer_of(TARGET))), read_inspected_head(head_answer(kind, HEAD), method)
    )
    return plan_from_spec(deployment(**fields), DEFAULTS, found.over(Facts()))


@pytest.mark.parametrize(
    ("kind", "method", "tokens"), [("EAGLE-1", "EAGLE", 5), ("EAGLE-3", "EAGLE", 5), ("Medusa", "Medusa", 3)]
)
def test_the_runtime_accepts_what_is_rendered(kind: str, method: str, tokens: int) -> None:
    plan = planned(kind, **spec(HEAD_HUB, method))
    assert plan.requires == ()
    boot = boot_config(plan)
    live = live_config(deployment(**spec(HEAD_HUB, method, governor={"mode": "Observe"})).spec)
    assert parse_boot(dump(boot), Path("boot.json")) == boot
    argv = to_args(RuntimeConfig.of(boot, live))
    assert {f"--speculation-method={method}", "--draft-model=/models/draft/huggingFace"} <= {*argv}
    parsed = from_args(argv)
    assert (parsed.speculation_method, parsed.draft_tokens) == (SpeculationMethod(method), tokens)
    assert parsed.speculation_governor is GovernorMode.OBSERVE
    assert parsed.config_hash() == boot.config_hash()
    assert (
        from_args(
            to_args(RuntimeConfig.of(boot_config(planned(kind, **spec(HEAD_HUB, method, maxDraftTokens=2)))))
        ).draft_tokens
        == 2
    )


def test_the_commit_of_the_head_is_fetched_into_a_volume_or_the_cache() -> None:
    fields = spec(HEAD_HUB)
    found = pod_template(deployment(**fields), planned(**fields), PodDefaults())["spec"]
    (fetch,) = [one for one in found["initContainers"] if one["name"] == "draft-fetch-model"]
    assert {"--hugging-face=org/head", f"--revision={HEAD}", "--into=/models/draft/huggingFace"} <= set(fetch["args"])
    (volume,) = [one for one in found["volumes"] if one["name"] == "draft-model"]
    assert volume["emptyDir"]["sizeLimit"] == "1025Mi", "its 0.9 MiB, and what every download has to spare"
    cached = fields | {"model": {"source": HUB, "cache": CACHE}}
    plan = planned(**cached)
    assert boot_config(plan).draft_model == f"/models/draft/huggingFace/org--head-{HEAD[:12]}"


def test_a_head_is_inspected_as_one() -> None:
    asked = subjects(deployment(**spec(HEAD_HUB)), DEFAULTS)
    assert (asked["draft"].what, asked["draft"].head_method) == ("draft head", "EAGLE")
    owner = deployment(**spec(HEAD_HUB))
    as_model = Subject(asked["draft"].source, field=asked["draft"].field)
    assert inspection_key(owner, asked["draft"]) != inspection_key(owner, as_model), "older answers know no heads"


async def test_a_model_with_its_head_is_served_and_a_restarted_operator_writes_nothing() -> None:
    operator = FakeOperator(world(manifest(**spec(HEAD_HUB))))
    await operator.turn()
    operator.cluster.run_jobs(answer_of(TARGET, **SIZES))
    await operator.turn()
    assert "Reading the draft head's shape: org/head at main." in operator.condition("Ready")["message"]
    operator.cluster.run_jobs(head_message(revision=HEAD))
    await operator.settle()
    assert operator.condition("Ready")["reason"] == "Ready", operator.condition("Ready")["message"]
    cluster = operator.cluster
    assert operator.status()["model"]["resolvedDraftRevision"] == HEAD
    assert operator.status()["plan"]["speculation"]["method"] == "EAGLE"
    files = [one["data"]["boot.json"] for one in cluster.all(CONFIG_MAP) if "boot.json" in one.get("data", {})]
    boot = json.loads(files[0])
    assert (boot["speculation_method"], boot["draft_model"]) == ("EAGLE", "/models/draft/huggingFace")
    assert cluster.all(JOB) == []
    restarted = FakeOperator(cluster)
    await restarted.settle()
    assert restarted.writes == []
    before = cluster.the(DEPLOYMENT)["spec"]["template"], [pod["metadata"]["uid"] for pod in cluster.all(POD)]
    respec(cluster, **spec(HEAD_HUB, governor={"mode": "Disabled"}))
    await operator.settle()
    assert (cluster.the(DEPLOYMENT)["spec"]["template"], [pod["metadata"]["uid"] for pod in cluster.all(POD)]) == before


@pytest.mark.parametrize(
    ("answer", "reason", "said"),
    [
        (answer_of(HEAD, **SIZES), "CheckpointInvalid", "the weights are those of no EAGLE head"),
        (head_message("Medusa", HEAD), "CheckpointInvalid", "set speculation.method to Medusa"),
        (head_message(revision=HEAD, unsupported="layernorms True"), "UnsupportedByRuntime", "layernorms True is not"),
    ],
)
async def test_what_is_no_such_head_is_named_with_its_field(answer: str, reason: str, said: str) -> None:
    operator = FakeOperator(world(manifest(**spec(HEAD_HUB))))
    await operator.turn()
    operator.cluster.run_jobs(answer_of(TARGET, **SIZES))
    await operator.turn()
    operator.cluster.run_jobs(answer)
    await operator.turn()
    ready = operator.condition("Ready")
    assert ready["reason"] == reason
    assert ready["message"].startswith("The draft head org/head at main (speculation.draftModel.source) cannot be insp")
    assert said in ready["message"]


async def test_a_head_of_another_model_makes_no_pod() -> None:
    operator = FakeOperator(world(manifest(**spec(HEAD_HUB))))
    await operator.turn()
    operator.cluster.run_jobs(answer_of(TARGET, **SIZES))
    await operator.turn()
    operator.cluster.run_jobs(head_message(revision=HEAD, hidden_size=512))
    await operator.settle()
    assert (
        "The hidden_size of the EAGLE-1 head (speculation.draftModel) is 512" in operator.condition("Ready")["message"]
    )
    assert operator.cluster.get(DEPLOYMENT, "demo") is None


def test_alerts_advise_to_tune_a_model_and_never_a_head() -> None:
    advice = {
        method: " ".join(alert.help for alert in alerts(deployment(**fields)))
        for method, fields in {"EAGLE": spec(HEAD_HUB), "DraftModel": spec(HEAD_HUB, "DraftModel")}.items()
    }
    assert "une the draft" in advice["DraftModel"]
    assert "une the draft" not in advice["EAGLE"]
    assert "name another draft head" in advice["EAGLE"]
