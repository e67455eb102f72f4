"""What the answer of an inspection refuses, before anything is created for the model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.kube.kinds import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    JOB,
    LLM_DEPLOYMENT,
)
from tests.support.fake_operator import answer_of, respec, served
from tests.support.inspected_models import (
    Manifest,
    hub,
    inspections,
    model,
    ready_reason,
    under_way,
)
from tests.support.llmdeployments import manifest


async def test_what_the_model_needs_is_known_before_a_pod_is_made() -> None:
    """The planner sees the shape: 4 GiB of memory do not hold this one."""
    operator = await under_way()
    await operator.settle(inspected=answer_of(hidden_size=8192, num_hidden_layers=80, intermediate_size=28672))
    assert ready_reason(operator) == "Infeasible"
    assert operator.cluster.get(DEPLOYMENT, "demo") is None
    assert operator.cluster.all(JOB) == [], "read, and deleted"


LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16}


def answer_with(quantization: Manifest | None = None, weights: Manifest | None = None, **config: Any) -> str:
    answer = json.loads(answer_of(**config)) | {"quantization_config": quantization}
    return json.dumps(answer | ({"weights": weights} if weights is not None else {}))


FP4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
GEMV = {"quant_method": "awq", "group_size": 32, "version": "gemv"}


@pytest.mark.parametrize(
    ("quantization", "named", "summary"),
    [
        (FP4, "quantization_config.bnb_4bit_quant_type 'fp4'", "CPU TP1 NF4"),
        (GEMV, "quantization_config.version 'gemv'", "CPU TP1 AWQ"),
        (GEMV | {"version": "x" * 300}, "quantization_config.version 'xxxx", "CPU TP1 AWQ"),
    ],
)
async def test_a_format_that_a_cpu_does_not_load_is_refused_before_anything_is_created(
    quantization: Manifest, named: str, summary: str
) -> None:
    operator = await under_way(manifest(model=model(persistentVolumeClaim={"claimName": "models"})))
    await operator.settle(inspected=answer_with(quantization))
    ready = operator.condition("Ready")
    assert ready["reason"] == "UnsupportedByRuntime"
    assert named in ready["message"]
    assert operator.cluster.get(DEPLOYMENT, "demo") is None
    assert operator.cluster.all(CONTROLLER_REVISION) == []
    assert operator.cluster.the(LLM_DEPLOYMENT)["status"]["plan"]["summary"] == summary


async def test_an_awq_folder_is_served_on_a_cpu() -> None:
    operator = await under_way(manifest(model=model(persistentVolumeClaim={"claimName": "models"})))
    await operator.settle(inspected=answer_with({"quant_method": "awq", "bits": 4, "group_size": 32}))
    assert ready_reason(operator) == "Ready"
    assert operator.cluster.the(LLM_DEPLOYMENT)["status"]["plan"]["quantization"] == "AWQ"


async def test_a_format_that_is_not_read_is_unsupported_by_its_name() -> None:
    operator = await under_way()
    operator.cluster.run_jobs(answer_with({"quant_method": "modelopt", "quant_algo": "NVFP4"}))
    await operator.turn()
    ready = operator.condition("Ready")
    assert (ready["reason"], "NVFP4" in ready["message"]) == ("UnsupportedByRuntime", True)


@pytest.mark.parametrize(
    ("held", "reason"),
    [(34_608_128, "Ready"), (34_608_128 * 2, "CheckpointInvalid"), (19_000_000, "CheckpointInvalid")],
)
async def test_weights_files_of_another_size_than_the_config_are_refused_with_both_figures(
    held: int, reason: str
) -> None:
    operator = await under_way()
    weights = {"file_bytes": 2 * held, "tensor_bytes": 2 * held, "elements_by_dtype": {"BF16": held}}
    operator.cluster.run_jobs(answer_with(None, weights, **LARGE))
    await operator.turn()
    ready = operator.condition("Ready")
    if reason == "Ready":
        await operator.settle(inspected="no inspection is started")
        assert ready_reason(operator) == reason
    else:
        assert ready["reason"] == reason
        assert "describes 0.07 GB of weights" in ready["message"]
        assert f"hold {held * 2 / 1e9:.2f} GB" in ready["message"]
        assert inspections(operator.cluster) == [], "the answer is not kept, so a corrected ConfigMap is read again"


async def test_a_record_of_an_older_operator_that_lies_refuses_the_next_plan_and_keeps_what_serves() -> None:
    operator = await served(manifest(model=hub()))
    (record,) = inspections(operator.cluster)
    answer = json.loads(record["data"]["answer.json"])
    answer["config"]["num_hidden_layers"] = 10**6
    stored = {"answer.json": json.dumps(answer)}
    name = record["metadata"]["name"]
    operator.cluster.edit(CONFIG_MAP, name, lambda one: one.pop("immutable"))  # as only a deletion could
    operator.cluster.edit(CONFIG_MAP, name, lambda one: one.update(data=stored))
    await operator.settle(inspected="no inspection is started")
    assert ready_reason(operator) == "Ready"
    respec(operator.cluster, engine={"maxNumSeqs": 8})
    await operator.settle(inspected="no inspection is started")
    ready = operator.condition("Ready")
    assert ready["reason"] == "CheckpointInvalid"
    assert "num_hidden_layers is 1000000" in ready["message"]
    assert operator.condition("Available")["status"] == "True"


ANSWERS = {
    "no JSON": ("killed", 0, "InvalidConfig", "version 1"),
    "another version": (json.dumps({"version": 2, "config": {}}), 0, "InvalidConfig", "version 1"),
    "an unknown family": (answer_of(model_type="mamba"), 0, "UnsupportedByRuntime", "mamba"),
    "an impossible shape": (answer_of(num_key_value_heads=3), 0, "CheckpointInvalid", "must divide"),
    "no words": ("", 137, "DownloadFailed", "exit code 137"),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_that_is_none_is_one_reason_and_is_not_kept(name: str) -> None:
    answer, code, reason, words = ANSWERS[name]
    operator = await under_way()
    operator.cluster.run_jobs(answer, code)
    await operator.turn()
    assert ready_reason(operator) == reason
    assert words in operator.condition("Ready")["message"]
    assert inspections(operator.cluster) == []
