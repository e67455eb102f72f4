"""Run inspections: apply what `inspection.next_step` decides.

A record is written before its Job is deleted, and a new attempt is created before an old one is deleted: after a crash
at any point, the next turn finds either the answer or the Job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.catalog.config_fields import ConfigError, UnsupportedModelError
from millstream_operator.catalog.inspected_model import InspectedModel
from millstream_operator.children.children import Children
from millstream_operator.children.job_needs import needed_by_job
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.plan_refused import RECHECK_SECONDS, PlanRefused
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.facts.inspection import next_step, read_subject, subjects
from millstream_operator.facts.job_attempts import attempt_of
from millstream_operator.facts.shared_inspections import SharedInspections
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import CONFIG_MAP, JOB, POD
from millstream_operator.planning.inspected import Inspected
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.rendering.inspect_job import MODEL_FIELD, Subject, inspect_job, inspection_key, sharing_key
from millstream_operator.rendering.inspection_record import inspection_record, is_inspection, read_record
from millstream_operator.rendering.names import INSPECTION_LABEL, INSPECTOR, role_of
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.surroundings import Surroundings

Manifest = dict[str, Any]


class NotInspected(PlanRefused):
    """The model is not known yet, so there is no plan; what was planned before stays.

    `is_soon_over`: another LLMDeployment asks for the same model already.
    """

    def __init__(self, problem: Diagnosis, recheck_seconds: float | None, *, is_soon_over: bool = False) -> None:
        super().__init__(problem, None, recheck_seconds)
        self.is_soon_over = is_soon_over


class Inspector:
    """Reads the facts about an owner's models, for the reconciler."""

    def __init__(
        self,
        children: Children,
        index: Index,
        plan_defaults: PlanDefaults,
        pod_defaults: PodDefaults,
        now: Callable[[], str],
        shared: SharedInspections,
        surroundings: Callable[[], Surroundings] = Surroundings,
        recheck_seconds: float = RECHECK_SECONDS,
    ) -> None:
        self._shared, self._surroundings, self._recheck_seconds = shared, surroundings, recheck_seconds
        self._children, self._index, self._now = children, index, now
        self._plan_defaults, self._pod_defaults = plan_defaults, pod_defaults

    async def ask(self, owner: LLMDeployment, key: OwnerKey) -> Inspected:
        """Return what a new plan must know of the models; nothing where it needs nothing.

        Raises:
            NotInspected: it is not known yet; the inspection is under way, or failed.
        """
        wanted = subjects(owner, self._plan_defaults)
        names = {inspection_key(owner, subject) for subject in wanted.values()}
        jobs = self._inspections(owner, key)
        await self._children.delete(owner, [job for job in jobs if _inspects(job) not in names])
        found = {name: await self._named(owner, key, subject) for name, subject in wanted.items()}
        return Inspected(found.get("model"), found.get("draft"))

    def known(self, owner: LLMDeployment, key: OwnerKey) -> Inspected:
        """Return what is on record, for a plan that exists already."""
        records = self._children.list_owned(owner, key, CONFIG_MAP)
        if not any(map(is_inspection, records)):
            return Inspected()
        found: dict[str, InspectedModel] = {}
        for name, subject in subjects(owner, self._plan_defaults).items():
            if (answer := read_record(records, inspection_key(owner, subject))) is not None:
                with contextlib.suppress(ConfigError):
                    found[name] = read_subject(subject, answer)
        return Inspected(found.get("model"), found.get("draft"))

    async def _named(self, owner: LLMDeployment, key: OwnerKey, subject: Subject) -> InspectedModel:
        """As `_inspected`. A draft that fails is named with its field: the failure alone could be either's."""
        try:
            return await self._inspected(owner, key, subject)
        except NotInspected as error:
            if subject.field == MODEL_FIELD or error.problem.reason is Reason.INSPECTING:
                raise
            named = f"The {subject.what} {subject} ({subject.field}) cannot be inspected: {error.problem.detail}"
            raise NotInspected(replace(error.problem, detail=named), error.recheck_seconds) from None

    async def _inspected(self, owner: LLMDeployment, key: OwnerKey, subject: Subject) -> InspectedModel:
        name = inspection_key(owner, subject)
        records = self._children.list_owned(owner, key, CONFIG_MAP)
        jobs = [job for job in self._inspections(owner, key) if _inspects(job) == name]
        answer = read_record(records, name)
        if answer is None:
            shared_name = sharing_key(owner, subject, self._image(owner))
            answer = self._shared.answer(shared_name, key) if not jobs else None
            answer = answer or await self._ask_for_all(owner, key, subject, jobs)
            await self._apply(owner, [inspection_record(owner, name, answer)])
        await self._children.delete(owner, jobs)
        try:
            return read_subject(subject, answer)
        except UnsupportedModelError as error:  # a record of another version of the operator, which knew more families
            raise NotInspected(Diagnosis(Reason.UNSUPPORTED_BY_RUNTIME, str(error)), None) from None
        except ConfigError as error:  # … or checked less
            raise NotInspected(Diagnosis(Reason.CHECKPOINT_INVALID, str(error)), None) from None

    def _inspections(self, owner: LLMDeployment, key: OwnerKey) -> list[Manifest]:
        """Return the owner's Jobs that inspect a model; Jobs of another role are not the inspector's."""
        return [job for job in self._children.list_owned(owner, key, JOB) if role_of(job) == INSPECTOR]

    async def _ask_for_all(
        self, owner: LLMDeployment, key: OwnerKey, subject: Subject, jobs: Sequence[Manifest]
    ) -> Manifest:
        """Return the answer of an own inspection, shared within the namespace; or wait for that of another owner."""
        name = sharing_key(owner, subject, self._image(owner))
        other = self._shared.asked_by(name, key) if not jobs else None
        if other is not None:
            message = f"Reading the {subject.what}'s shape, for the LLMDeployment {other.name}, too: {subject}."
            raise NotInspected(Diagnosis(Reason.INSPECTING, message), self._recheck_seconds, is_soon_over=True)
        self._shared.asking(name, key)
        try:
            answer = await self._ask(owner, key, subject, jobs)
        except BaseException as error:
            if not isinstance(error, NotInspected) or error.problem.reason != Reason.INSPECTING:
                self._shared.failed(name, key)
            raise
        self._shared.answered(name, key, answer)
        return answer

    async def _ask(self, owner: LLMDeployment, key: OwnerKey, subject: Subject, jobs: Sequence[Manifest]) -> Manifest:
        """Return the answer if there is one; else take the next step and raise NotInspected."""

        def attempt(number: int) -> Manifest:
            return inspect_job(owner, subject, self._image(owner), self._pod_defaults, number)

        todays = [job for job in jobs if job["metadata"]["name"] == attempt(attempt_of(job))["metadata"]["name"]]
        step = next_step(subject, todays, self._index.children(key, POD), self._now())
        if step.answer is not None:
            return step.answer
        started = [attempt(step.start)] if step.start is not None else []
        await self._apply(owner, [*needed_by_job(self._children, owner, key, self._surroundings()), *started])
        outdated = [job for job in jobs if job not in todays]
        await self._children.delete(owner, [*outdated, *step.to_delete])
        assert step.problem is not None  # noqa: S101 - no answer
        raise NotInspected(step.problem, step.recheck_seconds)

    async def _apply(self, owner: LLMDeployment, wanted: Sequence[Manifest]) -> None:
        if (problem := await self._children.apply_all(owner, wanted)) is not None:
            raise NotInspected(problem, self._recheck_seconds)

    def _image(self, owner: LLMDeployment) -> str:
        """Return the runtime image that the next plan would have."""
        runtime = owner.spec.runtime
        return (runtime.image if runtime is not None else None) or self._plan_defaults.runtime_image


def _inspects(job: Manifest) -> str | None:
    """Return the inspection key of a Job."""
    found: str | None = job["metadata"].get("labels", {}).get(INSPECTION_LABEL)
    return found
