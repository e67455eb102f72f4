"""A Job's pod may say anything: another image than ours may run in it. One reason, and no turn that fails."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millstream_operator.diagnosis.diagnosis import Diagnosis, sentence
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.kube.kinds import JOB
from millstream_operator.preparation.step_answers import read_step_answer
from millstream_operator.rendering.preparation_job import StepKind
from tests.support.fake_cluster import pod_of
from tests.support.fake_operator import FakeOperator, judged, tuned
from tests.support.prepared_models import CACHE, CALIBRATED, MADE, Manifest, preparing

HUB: Manifest = {"source": {"huggingFace": {"repository": "org/name"}}}
DEEP = "[" * 4000
PULLING = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'}}


@pytest.mark.parametrize(
    ("kind", "said", "changes"),
    [
        (StepKind.JUDGE, judged(), {"slices_left_out": "many"}),
        (StepKind.JUDGE, judged(), {"slices_left_out": -1}),
        (StepKind.JUDGE, judged(), {"slices": [{"slice": "chat", "failures": 5}]}),
        (StepKind.JUDGE, judged(), {"verdict": ["passed"]}),
        (StepKind.TUNE, tuned(), {"reasons": 5}),
        (StepKind.TUNE, tuned(), {"verdict": {}}),
    ],
)
def test_an_answer_whose_parts_have_other_types_is_one_that_no_operator_reads(
    kind: StepKind, said: str, changes: dict[str, Any]
) -> None:
    assert not isinstance(read_step_answer(kind, said), Diagnosis)
    found = read_step_answer(kind, json.dumps(json.loads(said) | changes))
    assert isinstance(found, Diagnosis)
    assert found.reason is Reason.INVALID_CONFIG


@pytest.mark.parametrize(
    "said", ['{"reason": [], "message": "x"}', '{"reason": {"a": 1}, "message": "x"}', '{"reason": null}', DEEP, "[]"]
)
async def test_a_report_in_another_form_is_a_failure_without_words(said: str) -> None:
    operator = await preparing("quantize", **MADE)
    operator.cluster.run_jobs(said, 1)
    await operator.turn()
    assert operator.condition("ModelReady")["reason"] in ("PreparationFailed", "RuntimeCrashed")


async def test_half_a_surrogate_pair_and_a_terminals_controls_are_written_once_and_can_be_read() -> None:
    operator = await preparing("quantize", **MADE)
    operator.cluster.run_jobs('{"reason": "InvalidConfig", "message": "Line \\ud800 \\u001b[31m is no document."}', 2)
    await operator.turn()
    message = operator.condition("ModelReady")["message"]
    assert message.isprintable()
    assert message.encode("utf-8")
    assert "Line \\ud800 \\x1b[31m is no document." in message
    assert sentence("Größe × 2 — “x”") == "Größe × 2 — “x”.", "what people write stays"


async def with_pod(**status: Any) -> FakeOperator:
    """An operator whose Job, of a model that is downloaded, has a pod with this status."""
    operator = await preparing("quantize", model=HUB | CACHE, quantization=CALIBRATED)
    (job,) = operator.cluster.all(JOB)
    pod = pod_of(f"{job['metadata']['name']}-x", job["spec"]["template"], ready=False, **status)
    pod["metadata"]["ownerReferences"] = [{"kind": "Job", "name": "", "uid": job["metadata"]["uid"]}]
    operator.cluster.put(pod)
    await operator.turn()
    return operator


async def test_a_download_whose_image_cannot_be_pulled_is_said_while_the_job_waits() -> None:
    operator = await with_pod(
        initContainerStatuses=[{"name": "fetch-model", "state": PULLING}],
        containerStatuses=[{"name": "quantize-model", "state": {"waiting": {"reason": "PodInitializing"}}}],
    )
    found = operator.condition("ModelReady")
    assert found["reason"] == "ImagePullFailed", found
    assert "The image registry.example.com/runtime:1 cannot be pulled" in found["message"]


async def test_a_download_that_was_killed_for_memory_names_its_own_limit() -> None:
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": ""}}
    operator = await with_pod(initContainerStatuses=[{"name": "fetch-model", "state": killed}])
    found = operator.condition("ModelReady")
    assert found["reason"] == "OutOfMemory"
    assert "podTemplate.spec.initContainers[fetch-model].resources.limits.memory" in found["message"]
    assert "containers[runtime]" not in found["message"]
