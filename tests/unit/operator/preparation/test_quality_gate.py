"""No pod of a new revision starts before its model passed the gate; what serves stays, and the status says why."""

from __future__ import annotations

import json

import pytest

from millstream_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT, JOB
from tests.support.fake_operator import FakeOperator, judged, respec, served
from tests.support.llmdeployments import manifest
from tests.support.prepared_models import (
    FAILURE,
    GATE,
    JUDGED,
    MADE,
    arguments,
    commands,
    journal,
    preparing,
    records,
    until,
)


async def failed_gate(operator: FakeOperator) -> None:
    """The Job that judges ends with a verdict of failed."""
    operator.cluster.run_jobs(judged("failed", [FAILURE]), 3)
    operator.cluster.collect_garbage()
    await operator.turn()


async def test_what_was_made_is_compared_with_its_source_by_the_limits_of_the_spec() -> None:
    limits = {
        "maxMeanKL": "20m",
        "maxP99KL": "0.5",
        "minTop1AgreementPercent": 97,
        "maxFlipPercent": 2,
        "maxPerplexityRatio": "1.02",
    }
    quantization = MADE["quantization"] | {"qualityGate": GATE | limits}
    operator = await preparing("quality", model=MADE["model"], quantization=quantization)
    words = the_arguments(operator)
    assert words[1] == "/models/demo-chat"
    assert words[2].startswith("/models/quantized/awq-")
    assert words[3:] == [
        "--data=/var/run/millstream/dataset/held-out/data.jsonl",
        "--max-mean-kl=0.02",
        "--max-p99-kl=0.5",
        "--max-perplexity-ratio=1.02",
        "--min-top1-agreement-percent=97",
        "--max-flip-percent=2",
        "--worst=0",
        "--device=cpu",
    ]


async def test_a_limit_keeps_every_digit() -> None:
    limits = {"maxPerplexityRatio": "1.000001", "maxP99KL": "123456.5"}
    quantization = MADE["quantization"] | {"qualityGate": GATE | limits}
    operator = await preparing("quality", model=MADE["model"], quantization=quantization)
    assert {"--max-perplexity-ratio=1.000001", "--max-p99-kl=123456.5"} <= {*the_arguments(operator)}


@pytest.mark.parametrize(("asked", "flags"), [("INT8", ["int8"]), ("FP8", ["fp8"]), ("None", []), ("Auto", [])])
async def test_the_gate_judges_the_kv_cache_that_the_pods_will_have(asked: str, flags: list[str]) -> None:
    quantization = MADE["quantization"] | {"kvCache": asked}
    operator = await preparing("quality", model=MADE["model"], quantization=quantization)
    name = "--candidate-kv-cache-dtype="
    assert [word.removeprefix(name) for word in the_arguments(operator) if word.startswith(name)] == flags


async def test_another_format_of_the_kv_cache_is_judged_before_it_serves() -> None:
    operator = await served(manifest(**MADE))
    before = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    respec(operator.cluster, quantization=MADE["quantization"] | {"kvCache": "INT8"})
    await until(operator, "quality")
    await failed_gate(operator)
    assert operator.condition("ModelReady")["reason"] == "QualityGateFailed"
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] == before
    respec(operator.cluster, quantization=MADE["quantization"])
    await operator.settle(inspected="no Job is started")
    assert operator.condition("Ready")["status"] == "True", "the verdict of the weights alone is on record"


def the_arguments(operator: FakeOperator) -> list[str]:
    (found,) = [arguments(job) for job in operator.cluster.all(JOB)]
    return found


async def test_a_model_that_passed_serves_and_the_condition_has_its_figures() -> None:
    operator = await served(manifest(**MADE))
    assert journal(operator) == [
        "QuantizationStarted",
        "ModelQuantized",
        "QualityGateStarted",
        "QualityGatePassed",
    ]
    message = operator.condition("ModelReady")["message"]
    assert "chat: mean KL 0.004, top-1 98.6 %, perplexity × 1.002" in message
    await operator.turn()
    assert operator.condition("ModelReady")["message"] == message, "of a plan that is kept, too"
    assert operator.writes == []


async def test_while_the_gate_judges_the_old_pods_serve_and_no_new_one_starts() -> None:
    operator = await served(manifest())
    before = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    respec(operator.cluster, **MADE)
    await until(operator, "quality")
    await operator.turn()
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] == before
    found = operator.condition("ModelReady")
    assert (found["status"], found["reason"]) == ("False", "JudgingQuality")
    assert "Step 2 of 2" in found["message"]


@pytest.mark.parametrize(
    ("spec", "change"),
    [(MADE, "another quantization.method, other calibration documents"), (JUDGED, "another model.source")],
    ids=["made", "quantized already"],
)
async def test_a_model_that_is_worse_is_refused_for_good_while_the_old_pods_serve(
    spec: dict[str, object], change: str
) -> None:
    operator = await served(manifest())
    before = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    respec(operator.cluster, **spec)
    await until(operator, "quality")
    await failed_gate(operator)
    found = operator.condition("ModelReady")
    assert (found["status"], found["reason"]) == ("False", "QualityGateFailed")
    assert f"code: {FAILURE}" in found["message"]
    assert f"Set {change} or wider limits (quantization.qualityGate: maxMeanKL)." in found["message"]
    assert operator.condition("Stalled")["reason"] == "QualityGateFailed"
    assert operator.condition("Available")["status"] == "True"
    assert journal(operator)[-1] == "QualityGateFailed"
    operator.client.requests.clear()
    operator.now = "2025-01-02T00:00:00Z"
    await operator.settle(inspected="no Job is started")
    assert commands(operator) == []
    assert ("apply", "Job") not in operator.writes, "the verdict is on record"
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] == before


async def test_back_to_the_old_spec_is_back_to_ready() -> None:
    operator = await served(manifest())
    respec(operator.cluster, **MADE)
    await until(operator, "quality")
    await failed_gate(operator)
    respec(operator.cluster, model=manifest()["spec"]["model"], quantization=None)
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    assert operator.condition("ModelReady")["reason"] == "Answering"


async def test_the_journal_has_the_steps_of_each_model_that_is_tried() -> None:
    operator = await served(manifest(**JUDGED))
    respec(operator.cluster, model={"source": {"local": {"path": "another"}}})
    await operator.settle()
    assert journal(operator) == ["QualityGateStarted", "QualityGatePassed"] * 2


async def test_wider_limits_judge_anew_and_make_nothing_anew() -> None:
    operator = await served(manifest())
    respec(operator.cluster, **MADE)
    await until(operator, "quality")
    await failed_gate(operator)
    respec(operator.cluster, quantization=MADE["quantization"] | {"qualityGate": GATE | {"maxMeanKL": "1"}})
    await operator.turn()
    assert commands(operator) == ["quality"]
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


async def test_observe_serves_a_model_that_is_worse_and_says_so() -> None:
    operator = await served(manifest())
    quantization = MADE["quantization"] | {"qualityGate": GATE | {"mode": "Observe"}}
    respec(operator.cluster, model=MADE["model"], quantization=quantization)
    await until(operator, "quality")
    await failed_gate(operator)
    await operator.settle()
    found = operator.condition("ModelReady")
    assert (found["status"], operator.condition("Ready")["status"]) == ("True", "True")
    assert f"mode is Observe: code: {FAILURE}" in found["message"]


async def test_enforcing_what_was_observed_takes_nothing_down() -> None:
    quantization = MADE["quantization"] | {"qualityGate": GATE | {"mode": "Observe"}}
    operator = await served(manifest(model=MADE["model"], quantization=quantization))
    before = operator.cluster.the(DEPLOYMENT)["spec"]["template"]
    respec(operator.cluster, **MADE)
    await operator.settle(inspected="no Job is started")
    assert operator.condition("Ready")["status"] == "True"
    assert operator.cluster.the(DEPLOYMENT)["spec"]["template"] == before


async def test_a_gate_that_is_added_to_a_model_that_serves_waits_for_the_next_revision() -> None:
    operator = await served(manifest())
    respec(operator.cluster, quantization={"qualityGate": GATE | {"base": {"local": {"path": "other"}}}})
    await operator.settle(inspected="no Job is started")
    assert commands(operator) == []
    assert "has not judged this revision" in operator.condition("ModelReady")["message"]
    assert operator.condition("Ready")["status"] == "True"


async def test_the_base_of_a_quantized_source_is_downloaded_next_to_it() -> None:
    operator = await preparing(
        "quality",
        model={"source": {"huggingFace": {"repository": "org/name-awq"}}},
        quantization={"qualityGate": GATE | {"base": {"huggingFace": {"repository": "org/name"}}}},
    )
    words = the_arguments(operator)
    assert words[1:3] == ["/models/base/huggingFace", "/models/huggingFace"]


async def test_a_gate_that_cannot_run_is_one_reason_and_is_tried_again() -> None:
    operator = await served(manifest())
    respec(operator.cluster, **MADE)
    await until(operator, "quality")
    operator.cluster.run_jobs("", 1)
    await operator.turn()
    found = operator.condition("ModelReady")
    assert found["reason"] == "PreparationFailed"
    assert found["message"].startswith("Judging the model ended with exit code 1.")
    assert operator.condition("Available")["status"] == "True"
    operator.now = "2025-01-01T01:00:00Z"
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    assert len(records(operator)) == 2


async def test_the_verdict_says_when_and_by_which_image_it_was_reached() -> None:
    """Weights that are overwritten in place, or another image, are not judged again."""
    operator = await preparing("quality", **JUDGED)
    (job,) = [job for job in operator.cluster.all(JOB) if arguments(job)[0] == "quality"]
    image = job["spec"]["template"]["spec"]["containers"][0]["image"]
    await operator.settle()
    message = operator.condition("ModelReady")["message"]
    assert "The quality gate passed: chat: mean KL 0.004" in message
    assert message.endswith(f" Judged on 2025-01-01 by image {image}; content not checked since.")
    again = FakeOperator(operator.cluster)
    again.now = "2026-01-01T00:00:00Z"
    await again.turn()
    assert again.condition("ModelReady")["message"] == message, "another process reads the record"


READ = {
    "sha256": "0123456789abcdef" * 4,
    "files": 9,
    "bytes": 3_400_000,
    "sampled": 1,
    "sampled_files": ["a.safetensors"],
}


async def judged_with(files: object) -> FakeOperator:
    """A model that passed, and whose Job said that of the files that it read."""
    operator = await preparing("quality", **JUDGED)
    operator.cluster.run_jobs(json.dumps(json.loads(judged()) | {"files": files}))
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"
    return operator


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"candidate": READ}, ", files sha256:0123456789ab (1 of 9 by size, header and samples)"),
        ({"candidate": READ | {"sampled": 0}}, ", files sha256:0123456789ab"),
        ({"candidate": {"sha256": "../../x"}}, ""),
        ({"candidate": []}, ""),
        ("all", ""),
    ],
    ids=["one sampled", "all whole", "no digest", "no object", "a string"],
)
async def test_the_verdict_says_which_files_it_is_about(files: object, words: str) -> None:
    operator = await judged_with(files)
    message = operator.condition("ModelReady")["message"]
    assert "The quality gate passed: chat: mean KL 0.004" in message
    image = operator.cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]["containers"][0]["image"]
    assert message.endswith(f" Judged on 2025-01-01 by image {image}{words}; content not checked since.")


async def test_a_verdict_of_an_older_operator_names_no_files_and_is_not_reached_again() -> None:
    operator = await judged_with({"candidate": READ})
    (record,) = records(operator)
    answer = json.loads(record["data"]["answer.json"])
    before = json.dumps({key: answer[key] for key in answer if key not in ("files", "image")})
    operator.cluster.remove(CONFIG_MAP, record["metadata"]["name"])  # it is immutable
    operator.cluster.put(record | {"data": {"answer.json": before}})
    again = FakeOperator(operator.cluster)
    await again.settle(inspected="no Job is started")
    assert again.condition("ModelReady")["message"].endswith(" Judged on 2025-01-01; content not checked since.")
    assert again.condition("Ready")["status"] == "True"


@pytest.mark.parametrize(
    "message",
    [
        "/models/demo-draft was changed while it was judged (model.safetensors), so the figures would be of two "
        "models: there is no verdict. Judge it again when nothing writes into it.",
        "/models/demo-draft/model.safetensors (812 bytes) is truncated or corrupt: incomplete metadata; fetch or build "
        "the file again.",
    ],
    ids=["replaced", "half written"],
)
async def test_files_without_a_verdict_are_named_and_judged_again(message: str) -> None:
    operator = await preparing("quality", **JUDGED)
    operator.cluster.run_jobs(json.dumps({"reason": "CheckpointInvalid", "message": message}), 1)
    await operator.turn()
    found = operator.condition("ModelReady")
    assert (found["status"], found["reason"]) == ("False", "CheckpointInvalid")
    assert message in found["message"]
    operator.now = "2025-01-01T01:00:00Z"
    await operator.settle()
    assert operator.condition("Ready")["status"] == "True"


async def test_the_job_that_judges_mounts_every_model_read_only() -> None:
    operator = await preparing("quality")
    (job,) = [job for job in operator.cluster.all(JOB) if arguments(job)[0] == "quality"]
    mounts = job["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    writable = [mount["mountPath"] for mount in mounts if not mount.get("readOnly")]
    assert [path for path in writable if path.startswith("/models")] == []
    assert any(mount["mountPath"].startswith("/models") for mount in mounts)
