"""The Job that tunes a draft model on the answers of its target, while the draft as it is serves.

    millstream tune-draft /models/<target> /models/<draft> --data=<dataset> --out=/models/tuned/draft-0123456789

It is made from the parts of the Jobs that quantize and judge (`preparation_job.py`), for the models that pods of a
pinned revision load. `tune-draft` goes on where an attempt before it was stopped, and takes a folder that is complete
as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.inspected import Inspected
from millstream_operator.planning.made_model import digest, made_method, named_source
from millstream_operator.planning.model_path import DRAFT_FOLDER, draft_path, model_path, tuned_path
from millstream_operator.planning.plan import ResourcePlan
from millstream_operator.planning.requires import draft_source, tuning_of
from millstream_operator.planning.spec_plan import weights_path
from millstream_operator.rendering.container_resources import container_resources
from millstream_operator.rendering.job_pod import job_container, job_pod_spec
from millstream_operator.rendering.model_source import (
    ModelFiles,
    SourceFiles,
    made_files,
    source_files,
    together,
    tuned_files,
)
from millstream_operator.rendering.names import RUNTIME_CONTAINER, TUNER
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.preparation_job import (
    PROCESS_BYTES,
    Step,
    dataset_file,
    download_container,
    given_resources,
    in_models,
    memory_resources,
    step_job,
    without_gpus,
)
from millstream_operator.rendering.revision import Revision
from millstream_runtime.job_memory.draft_tuning import ANSWERS_BYTES, PARAMETER_BYTES, POOL_REQUESTS, SCRATCH_BYTES

GENERAL_VOLUME = "general-dataset"
SEQUENCE_TOKENS = 1024  # of `millstream tune-draft`, where the spec says nothing


@dataclass(frozen=True, slots=True)
class DraftPair:
    """Target and draft as pods load them: the target's folder below the model root, and the resolved revisions."""

    target_path: str
    target_revision: str | None
    draft_revision: str | None


def tuning_key(owner: LLMDeployment, pair: DraftPair) -> str | None:
    """Return ten hex digits of everything that the tuned draft follows from; None where none is asked for.

    They name the folder, so that another target, draft or dataset makes another folder, and a spec that goes back finds
    the one that it had.
    """
    tuning, draft = tuning_of(owner.spec), draft_source(owner.spec)
    if tuning is None or draft is None:
        return None
    return digest(
        {
            "path": pair.target_path,
            "target": named_source(owner, owner.spec.model.source, pair.target_revision),
            "draft": named_source(owner, draft, pair.draft_revision),
            "tuning": tuning.model_dump(mode="json", by_alias=True, exclude_none=True),
        }
    )


def tuning_job(
    owner: LLMDeployment,
    step: Step,
    revision: Revision,
    inspected: Inspected,
    defaults: PodDefaults,
    attempt: int = 1,
) -> dict[str, Any]:
    """Return one attempt. `revision`: of the pods that serve meanwhile, whose image and models it takes."""
    args, files = _tune(owner, step, revision, inspected)
    resources = container_resources(_resources(owner, revision, inspected), given_resources(owner))
    container = job_container(owner, step.kind.container, revision.image, args, resources, files.mounts)
    pod_spec = job_pod_spec(owner, defaults, container, files, near_replicas=True)
    return step_job(owner, TUNER, step, pod_spec, defaults, attempt)


def _tune(owner: LLMDeployment, step: Step, revision: Revision, inspected: Inspected) -> tuple[list[str], ModelFiles]:
    tuning = tuning_of(owner.spec)
    assert tuning is not None  # noqa: S101 - the step says so
    data, files = dataset_file(tuning.dataset)
    repeatable = ["--keep-made", "--discard-other-work", "--only-better"]
    flags = [f"--data={data}", f"--out={in_models(tuned_path(step.key))}", *repeatable, "--device=cpu"]
    if tuning.general_dataset is not None:
        general, more = dataset_file(tuning.general_dataset, GENERAL_VOLUME)
        flags, files = [*flags, f"--general={general}"], together(files, more)
    numbers = {
        "steps": tuning.steps,
        "sequence-tokens": tuning.sequence_tokens,
        "max-answer-tokens": tuning.max_answer_tokens,
    }
    flags += [f"--{name}={value}" for name, value in numbers.items() if value is not None]
    target, draft, models = _models(owner, revision, inspected)
    return ["tune-draft", target, draft, *flags], together(together(models, tuned_files(owner, read_only=False)), files)


def _models(owner: LLMDeployment, revision: Revision, inspected: Inspected) -> tuple[str, str, ModelFiles]:
    """Return the folders of target and draft in the pod, and how they get there."""
    source = draft_source(owner.spec)
    assert source is not None  # noqa: S101 - a rule of the API
    container, image = download_container(owner), revision.image
    if made_method(owner.spec) is not None:
        target, files = weights_path(owner, revision.resolved_revision), made_files(owner)
    else:
        target = model_path(owner.spec, revision.resolved_revision)
        size_bytes = inspected.model.checkpoint_bytes if inspected.model is not None else None
        model = SourceFiles(owner.spec.model.source, target, revision.resolved_revision, size_bytes)
        files = source_files(owner, image, model, container)
    path = draft_path(owner.spec, source, revision.resolved_draft_revision)
    size_bytes = inspected.draft.checkpoint_bytes if inspected.draft is not None else None
    draft = SourceFiles(source, path, revision.resolved_draft_revision, size_bytes, DRAFT_FOLDER)
    return in_models(target), in_models(path), together(files, source_files(owner, image, draft, container))


def _resources(owner: LLMDeployment, revision: Revision, inspected: Inspected) -> ResourcePlan:
    """Memory for the target with the requests that it answers, or for the training of the draft: never both at once.

    Without an inspection the resources of the pods that serve have to do.
    """
    containers = revision.template["spec"]["containers"]
    serving = next(one["resources"] for one in containers if one["name"] == RUNTIME_CONTAINER)
    planned = without_gpus(ResourcePlan(serving.get("requests") or {}, serving.get("limits") or {}))
    if inspected.model is None or inspected.draft is None:
        return planned
    target, tuning = inspected.model.shape, tuning_of(owner.spec)
    tokens = (tuning.sequence_tokens if tuning is not None else None) or SEQUENCE_TOKENS
    answering_bytes = 4 * (target.parameters.total + POOL_REQUESTS * tokens * target.kv_elements_per_token())
    training_bytes = PARAMETER_BYTES * inspected.draft.shape.parameters.total + SCRATCH_BYTES
    return memory_resources(planned, PROCESS_BYTES + ANSWERS_BYTES + max(answering_bytes, training_bytes))
