"""What the status and the journal say about the steps of a preparation. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.optimization import Dataset, QualityGate
from millstream_operator.diagnosis.decisions import Decision, DecisionType
from millstream_operator.diagnosis.diagnosis import Diagnosis, sentence
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.facts.job_attempts import JobWork, attempt_of
from millstream_operator.planning.made_model import made_method
from millstream_operator.preparation.step_answers import (
    failures_in_words,
    figures_in_words,
    files_in_words,
    has_passed,
    read_step_answer,
)
from millstream_operator.rendering.inspect_job import Subject
from millstream_operator.rendering.preparation_job import Step, StepKind, gate_of

Manifest = dict[str, Any]
MEMORY_FIX = "Raise podTemplate.spec.containers[runtime].resources.limits.memory; its Jobs have the same."
MAX_IMAGE_CHARACTERS = 200
OLD_PODS = "Pods of an earlier revision, if any, keep serving."


def work_of(
    owner: LLMDeployment, steps: Sequence[Step], step: Step, jobs: Sequence[Manifest], progress: str | None = None
) -> JobWork:
    """Return what the Jobs of a step do, in the words of the status. `progress`: how far, in words, where known."""
    quantizes = step.kind is StepKind.QUANTIZE
    how_far = f": {progress}" if progress is not None else ""
    return JobWork(
        container=step.kind.container,
        what="Quantizing the model" if quantizes else "Judging the model",
        under_way=Diagnosis(
            Reason.QUANTIZING if quantizes else Reason.JUDGING_QUALITY,
            f"Step {steps.index(step) + 1} of {len(steps)}: {_doing(owner, step)}{since(jobs)}{how_far}.",
            OLD_PODS,
        ),
        failure=Reason.PREPARATION_FAILED,
        read=lambda message: read_step_answer(step.kind, message),
        exit_codes=frozenset({0}) if quantizes else frozenset({0, 3}),  # 3: the model is worse than the limits
        memory_fix=MEMORY_FIX,
    )


def failed(owner: LLMDeployment, step: Step, problem: Diagnosis) -> Diagnosis:
    """Return why a step has no answer, and what to do."""
    hint = problem.hint
    if not hint and problem.reason is Reason.INVALID_CONFIG:
        hint = f"Mend what it names; {_dataset(owner, step)}."
    begins = problem.detail.startswith(_what(step))
    detail = problem.detail if begins else f"{_what(step)} failed: {problem.detail}"
    return Diagnosis(problem.reason, sentence(detail), f"{hint} {OLD_PODS}".strip())


def gate_failed(owner: LLMDeployment, answer: Mapping[str, Any]) -> Diagnosis:
    """Return why a model that was judged does not serve."""
    is_made = made_method(owner.spec) is not None
    changes = ["another quantization.method, other calibration documents" if is_made else "another model.source"]
    if limits := _exceeded_limits(answer):
        changes.append(f"wider limits (quantization.qualityGate: {', '.join(limits)})")
    return Diagnosis(
        Reason.QUALITY_GATE_FAILED,
        sentence(f"The model is worse than quantization.qualityGate allows: {failures_in_words(answer)}"),
        f"Set {' or '.join(changes)}. {OLD_PODS}",
    )


def _exceeded_limits(answer: Mapping[str, Any]) -> list[str]:
    """Return the fields of the gate whose limits failed it. A failure begins with the name of its figure."""
    failed_figures = {str(words).partition(" ")[0] for one in answer["slices"] for words in one.get("failures") or ()}
    fields = QualityGate.model_fields.items()
    return [str(field.alias) for name, field in fields if name.partition("_")[2] in failed_figures]


def gate_in_words(answer: Mapping[str, Any]) -> str:
    """Return the figures of a model that serves."""
    if has_passed(answer):
        return f"{sentence(f'The quality gate passed: {figures_in_words(answer)}')}{_judged_when(answer)}"
    failures = sentence(f"The quality gate failed and mode is Observe: {failures_in_words(answer)}")
    return f"{failures}{_judged_when(answer)}"


def _judged_when(answer: Mapping[str, Any]) -> str:
    """Say when it was judged, by which image and which files: none of these is compared with today's."""
    judged_at, image = answer.get("judgedAt"), answer.get("image")
    if not isinstance(judged_at, str):
        return ""  # a record of an older version
    by = f" by image {image[:MAX_IMAGE_CHARACTERS]}" if isinstance(image, str) else ""
    files = f", {words}" if (words := files_in_words(answer)) else ""
    return f" Judged on {judged_at[:10]}{by}{files}; content not checked since."


def started(owner: LLMDeployment, step: Step, path: str) -> Decision:
    """The journal's entry for a step that begins."""
    if step.kind is StepKind.QUANTIZE:
        detail = f"{_doing(owner, step)} into {path} of model.cache, before a pod of it starts."
        return Decision(DecisionType.QUANTIZATION_STARTED, f"{detail[:1].upper()}{detail[1:]}")
    detail = f"{path}: {_doing(owner, step)}, before a pod of it starts."
    return Decision(DecisionType.QUALITY_GATE_STARTED, detail)


def quantized(answer: Mapping[str, Any], path: str, predicted_bytes: int | None) -> Decision:
    """The journal's entry for a model that is made: the bytes of its weights, predicted and measured."""
    predicted = f", {predicted_bytes / 1e6:.2f} MB predicted" if predicted_bytes is not None else ""
    return Decision(
        DecisionType.MODEL_QUANTIZED,
        f"{path} of model.cache is complete: {answer['weights_bytes'] / 1e6:.2f} MB of weights{predicted}.",
    )


def judged(answer: Mapping[str, Any], path: str) -> Decision:
    """The journal's entry for a model that was compared with its base."""
    if has_passed(answer):
        return Decision(DecisionType.QUALITY_GATE_PASSED, sentence(f"{path}: {figures_in_words(answer)}"))
    return Decision(DecisionType.QUALITY_GATE_FAILED, sentence(f"{path}: {failures_in_words(answer)}"))


def _doing(owner: LLMDeployment, step: Step) -> str:
    if step.kind is StepKind.QUANTIZE:
        return f"quantizing {Subject(owner.spec.model.source)} with {made_method(owner.spec)}"
    gate = gate_of(owner)
    base = gate.base if gate is not None and gate.base is not None else owner.spec.model.source
    return f"comparing the model with {Subject(base)} on held-out documents"


def since(jobs: Sequence[Manifest]) -> str:
    """Say which Job does it, where there is one."""
    newest = max(jobs, key=attempt_of, default=None)
    if newest is None:
        return ""
    metadata = newest["metadata"]
    began = f", since {metadata['creationTimestamp']}" if metadata.get("creationTimestamp") else ""
    return f" (Job {metadata['name']}, attempt {attempt_of(newest)}{began})"


def _what(step: Step) -> str:
    return "Quantizing the model" if step.kind is StepKind.QUANTIZE else "Judging the model"


def _dataset(owner: LLMDeployment, step: Step) -> str:
    """Name the documents of a step. The one that quantizes checks those of the gate first, and its message says so."""
    quantization, gate = owner.spec.quantization, gate_of(owner)
    judged_by = _named(gate.dataset, "qualityGate.dataset") if gate is not None else ""
    if step.kind is not StepKind.QUANTIZE or quantization is None or quantization.calibration is None:
        return judged_by
    calibrated_by = _named(quantization.calibration, "calibration")
    return f"{calibrated_by}; those of --check-data are judged by: {judged_by}" if judged_by else calibrated_by


def _named(dataset: Dataset, field: str) -> str:
    if dataset.config_map_ref is None:
        return f"the documents are the file of quantization.{field}.persistentVolumeClaim"
    named = dataset.config_map_ref
    return f"the documents are key {named.key} of ConfigMap {named.name} (quantization.{field})"
