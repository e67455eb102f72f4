"""Take the steps of a preparation, one after another (`step_runner.py`).

quantize into model.cache -> judge against the base -> Prepared
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.optimization import GateMode
from millstream_operator.catalog.inspected_model import InspectedModel
from millstream_operator.children.children import Children
from millstream_operator.children.volume_checks import VolumeChecks
from millstream_operator.diagnosis.conditions import MODEL_READY, Condition
from millstream_operator.diagnosis.decisions import Decision
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.plan_refused import RECHECK_SECONDS, PlanRefused
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.facts.job_attempts import JobWork
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import POD
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.made_model import as_made, weights_file_bytes
from millstream_operator.planning.plan import Plan
from millstream_operator.planning.rollout_strategy import certainly_surges
from millstream_operator.preparation import step_messages
from millstream_operator.preparation.step_answers import has_passed
from millstream_operator.preparation.step_runner import StepRunner
from millstream_operator.rendering.names import PREPARER
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.preparation_job import Step, StepKind, gate_of, preparation_job, steps_of
from millstream_operator.rendering.surroundings import Surroundings

Manifest = dict[str, Any]
NOT_JUDGED = (
    "The quality gate has not judged this revision, which served before the gate was as it is now; it judges the next."
)


class NotPrepared(PlanRefused):
    """The model is not made or not judged yet, or is not good enough: no pod of it starts, and what serves stays."""

    def __init__(
        self,
        problem: Diagnosis,
        plan: Manifest | None,
        recheck_seconds: float | None = None,
        decisions: Sequence[Decision] = (),
    ) -> None:
        super().__init__(problem, plan, recheck_seconds)
        self.conditions = (Condition(MODEL_READY, False, problem.reason, problem.message),)
        self.decisions = tuple(decisions)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The model may serve. `quality`: the figures of the gate; `decisions`: the steps, for the journal."""

    quality: str = ""
    decisions: tuple[Decision, ...] = ()


NOTHING_PREPARED = Prepared()  # the spec asks for nothing


class PodProgress(Protocol):
    """Who asks the pod of a Job how far it is: see `probing.step_reports`."""

    def follow(self, key: OwnerKey, pod: Manifest | None) -> None: ...

    def of(self, key: OwnerKey) -> str | None: ...


class Preparer:
    """Makes and judges an owner's model, for the reconciler."""

    def __init__(
        self,
        children: Children,
        index: Index,
        pod_defaults: PodDefaults,
        now: Callable[[], str],
        volume_checks: VolumeChecks,
        surroundings: Callable[[], Surroundings] = Surroundings,
        reports: PodProgress | None = None,
        recheck_seconds: float = RECHECK_SECONDS,
    ) -> None:
        self._index, self._reports = index, reports
        self._pod_defaults, self._volume_checks = pod_defaults, volume_checks
        self._steps = StepRunner(children, index, now, surroundings, PREPARER, recheck_seconds)

    async def ask(self, owner: LLMDeployment, key: OwnerKey, plan: Plan, source: InspectedModel | None) -> Prepared:
        """Return at once where nothing is to be done; else when all steps are done. `source`: what was inspected.

        Raises:
            NotPrepared: a step is under way or failed, or the model is not good enough.
            PlanRefused: its pods could not mount their volumes, so no Job runs.
        """
        surges = certainly_surges(owner, plan.status_plan())
        if (problem := await self._volume_checks.problem(owner, surges=surges)) is not None:
            raise PlanRefused(problem, plan.status_plan())
        steps = steps_of(owner, plan.model_path, plan.model_revision)
        await self._steps.delete_others(owner, key, {step.key for step in steps})
        decisions: list[Decision] = []
        quality = ""
        for step in steps:
            answer = await self._answer(owner, key, steps, step, plan, source, decisions)
            if step.kind is StepKind.QUANTIZE:
                decisions.append(step_messages.quantized(answer, plan.model_path, _predicted_bytes(owner, source)))
                continue
            decisions.append(step_messages.judged(answer, plan.model_path))
            gate = gate_of(owner)
            if not has_passed(answer) and (gate is None or gate.mode is not GateMode.OBSERVE):
                self._follow(key, None)
                raise NotPrepared(step_messages.gate_failed(owner, answer), plan.status_plan(), None, decisions)
            quality = step_messages.gate_in_words(answer)
        self._follow(key, None)  # all steps have an answer
        return Prepared(quality, tuple(decisions))

    async def stop(self, owner: LLMDeployment, key: OwnerKey) -> None:
        """Delete the Jobs of an older spec: the new one asks for nothing."""
        self._follow(key, None)
        await self._steps.stop(owner, key)

    async def known(self, owner: LLMDeployment, key: OwnerKey, path: str, revision: str | None) -> Prepared:
        """Return what is on record of a model that serves, and stop what another spec asked for in between.

        The model's own Jobs are deleted, too: what they answered is on record, or went with its volume.

        `path`, `revision`: of its plan.
        """
        steps = steps_of(owner, path, revision)
        self._follow(key, None)
        await self._steps.stop(owner, key)
        gates = [one for one in steps if one.kind is StepKind.JUDGE]
        if not gates:
            return Prepared()
        answer = self._steps.recorded(owner, key, gates[0])
        return Prepared(step_messages.gate_in_words(answer) if answer is not None else NOT_JUDGED)

    def is_made_again(self, owner: LLMDeployment, key: OwnerKey, path: str, revision: str | None) -> bool:
        """Whether a model that was made is gone with its volume, so that its Job runs again though its plan is kept.

        `path`, `revision`: of that plan.
        """
        steps = steps_of(owner, path, revision)
        return any(self._steps.is_made_again(owner, key, one) for one in steps if one.kind is StepKind.QUANTIZE)

    def _follow(self, key: OwnerKey, pod: Manifest | None) -> None:
        if self._reports is not None:
            self._reports.follow(key, pod)

    async def _answer(
        self,
        owner: LLMDeployment,
        key: OwnerKey,
        steps: Sequence[Step],
        step: Step,
        plan: Plan,
        source: InspectedModel | None,
        decisions: Sequence[Decision],
    ) -> Manifest:
        """Return the answer of a step if there is one; else do what is next and raise NotPrepared."""

        def attempt(number: int) -> Manifest:
            return preparation_job(owner, step, plan, source, self._pod_defaults, number)

        def work_of(jobs: Sequence[Manifest]) -> JobWork:
            self._follow(key, running_pod(self._index.children(key, POD), step, jobs))
            progress = self._reports.of(key) if self._reports is not None else None
            return step_messages.work_of(owner, steps, step, jobs, progress)

        state = await self._steps.run(owner, key, step, attempt, work_of)
        if state.answer is not None:
            return state.answer
        # The Jobs of later steps are of what has to be made again. Their pods would hold a cache that is being deleted.
        await self._steps.stop(owner, key, {one.key for one in steps[: steps.index(step) + 1]})
        assert state.problem is not None  # noqa: S101 - no answer
        if state.is_refused:
            raise NotPrepared(state.problem, plan.status_plan(), state.recheck_seconds)
        is_under_way = state.problem.reason in (Reason.QUANTIZING, Reason.JUDGING_QUALITY)
        problem = state.problem if is_under_way else step_messages.failed(owner, step, state.problem)
        announced = [*decisions, step_messages.started(owner, step, plan.model_path)]
        raise NotPrepared(problem, plan.status_plan(), state.recheck_seconds, announced)


def running_pod(pods: Sequence[Manifest], step: Step, jobs: Sequence[Manifest]) -> Manifest | None:
    """Return the pod of one of the Jobs in which the step's container runs."""
    uids = {job["metadata"].get("uid") for job in jobs}
    for pod in pods:
        owners = {reference.get("uid") for reference in pod["metadata"].get("ownerReferences") or ()}
        statuses = pod.get("status", {}).get("containerStatuses") or ()
        runs = any(one.get("name") == step.kind.container and "running" in one.get("state", {}) for one in statuses)
        if runs and uids & owners:
            return pod
    return None


def _predicted_bytes(owner: LLMDeployment, source: InspectedModel | None) -> int | None:
    """Return the bytes of the weights that the plan counts with; None where the source was not inspected."""
    shape = as_made(owner.spec, Facts(source.shape)).shape if source is not None else None
    return weights_file_bytes(shape) if shape is not None else None
