"""Which models must be inspected before a plan, and the next step of an inspection (`job_attempts.py`). Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.optimization import QuantizationMethod
from millstream_operator.api.spec import Accelerator, AcceleratorType, LLMDeploymentSpec
from millstream_operator.api.workload import Workload
from millstream_operator.catalog.config_fields import ConfigError, UnsupportedModelError
from millstream_operator.catalog.inspected_model import (
    InspectedModel,
    UnknownAnswerError,
    read_answer,
    read_inspected,
    read_inspected_head,
)
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.facts.job_attempts import JobStep, JobWork, next_job_step
from millstream_operator.planning.choices.rounded_weights import is_judged
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.made_model import asked_method, made_method
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.requires import draft_source, head_method, source_kind
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.rendering.inspect_job import Subject
from millstream_operator.rendering.names import INSPECT_CONTAINER
from millstream_runtime.config import CAPABILITIES, Capabilities
from millstream_runtime.quantization_config.scheme import ROUNDED_METHOD

Manifest = dict[str, Any]
# Requirements of a plan that facts alone can meet: what RTN made is stored under other names, and a GGUF file of 16
# bits is no quantized one.
WANTS_FACTS = frozenset({"inventory", "modelShape", "configMapRef", "quantization=RTN", "quantization=GGUF"})
DRAFT_FIELD = "speculation.draftModel.source"


def subjects(owner: LLMDeployment, defaults: PlanDefaults, runtime: Capabilities = CAPABILITIES) -> dict[str, Subject]:
    """Return what must be inspected before a plan can be made: `model`, `draft`, both or nothing.

    Nothing is inspected for a plan that the runtime cannot run with any model, since it will be refused. A folder in
    the runtime image is inspected only where the plan depends on it: a small model on a CPU starts at once. A model and
    its draft are inspected both: they must suit each other.
    """
    if set(plan_from_spec(owner, defaults, Facts(runtime=runtime)).requires) - WANTS_FACTS:
        return {}
    found: dict[str, Subject] = {}
    model, draft = owner.spec.model, draft_source(owner.spec)
    if model.config_map_ref is not None or source_kind(model.source) != "local" or _depends_on_the_model(owner):
        found["model"] = Subject(model.source, model.config_map_ref)
    if draft is not None:
        found["draft"] = Subject(draft, field=DRAFT_FIELD, head_method=head_method(owner.spec))
    return found


def _depends_on_the_model(owner: LLMDeployment) -> bool:
    spec = owner.spec
    load = spec.workload or Workload()
    numbers = (load.input_tokens, load.output_tokens, load.requests_per_minute, load.concurrency)
    on_gpu = (spec.accelerator or Accelerator()).type is not AcceleratorType.CPU
    if made_method(spec) is not None or draft_source(spec) is not None or _names_no_format(spec):
        return True
    if asked_method(spec) == ROUNDED_METHOD and is_judged(spec):
        return True  # of a folder in 16 bits the gate would judge other weights than those that the runtime makes of it
    return on_gpu or spec.objectives is not None or spec.budget is not None or any(n is not None for n in numbers)


def _names_no_format(spec: LLMDeploymentSpec) -> bool:
    return spec.quantization is not None and spec.quantization.method is QuantizationMethod.RTN


def next_step(subject: Subject, jobs: Sequence[Manifest], pods: Sequence[Manifest], now: str) -> JobStep:
    """Return the next step. `jobs`: the attempts at this subject in its current form; `now` is RFC 3339."""
    work = JobWork(
        container=INSPECT_CONTAINER,
        what=f"The inspection of the {subject.what}",
        under_way=Diagnosis(Reason.INSPECTING, f"Reading the {subject.what}'s shape: {subject}."),
        failure=Reason.DOWNLOAD_FAILED,
        read=functools.partial(_read, subject),
    )
    return next_job_step(work, jobs, pods, now)


def read_subject(subject: Subject, answer: Mapping[str, Any]) -> InspectedModel:
    """Return the facts in an answer about `subject`. Raises ConfigError: as `read_inspected`."""
    if subject.head_method is not None:
        return read_inspected_head(answer, subject.head_method)
    return read_inspected(answer)


def _read(subject: Subject, message: str) -> Manifest | Diagnosis:
    """Return the answer in a pod's termination message, or why it is of no use."""
    try:
        answer = read_answer(message)
        read_subject(subject, answer)
    except UnknownAnswerError as error:
        return Diagnosis(Reason.INVALID_CONFIG, str(error))
    except UnsupportedModelError as error:
        return Diagnosis(Reason.UNSUPPORTED_BY_RUNTIME, str(error))
    except ConfigError as error:
        return Diagnosis(Reason.CHECKPOINT_INVALID, str(error))
    return answer
