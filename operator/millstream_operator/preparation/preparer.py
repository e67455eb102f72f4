"""Take the steps of a preparation: apply what `facts/job_attempts.py` decides for each.

    quantize into model.cache -> judge against the base -> Prepared

A record is written before its Job is deleted, and a new attempt is created before an old one is deleted: after a crash
at any point, the next turn finds either the answer or the Job. A step whose record exists is not done again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.optimization import GateMode
from millstream_operator.catalog.inspected_model import InspectedModel
from millstream_operator.children.children import Children
from millstream_operator.children.volume_checks import VolumeChecks
from millstream_operator.diagnosis.conditions import MODEL_READY, Condition
from millstream_operator.diagnosis.decisions import Decision
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.plan_refused import PlanRefused
from millstream_operator.facts.job_attempts import attempt_of, next_job_step
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import CONFIG_MAP, JOB, POD
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.made_model import as_made, weights_file_bytes
from millstream_operator.planning.plan import Plan
from millstream_operator.planning.rollout_strategy import certainly_surges
from millstream_operator.preparation import step_messages
from millstream_operator.preparation.step_answers import has_passed, read_step_answer
from millstream_operator.rendering.model_cache import model_cache
from millstream_operator.rendering.names import PREPARATION_LABEL, PREPARER, role_of
from millstream_operator.rendering.network_policy import network_policy
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.preparation_job import Step, StepKind, gate_of, preparation_job, steps_of
from millstream_operator.rendering.preparation_record import outdated_records, preparation_record, recorded_text
from millstream_operator.rendering.service_account import service_account
from millstream_operator.rendering.surroundings import Surroundings

Manifest = dict[str, Any]
RECHECK_SECONDS = 30.0
NOT_JUDGED = (
    "The quality gate has not judged this revision, which served before there was the gate; it judges the next."
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
    ) -> None:
        self._children, self._index, self._pod_defaults = children, index, pod_defaults
        self._now, self._volume_checks, self._surroundings = now, volume_checks, surroundings

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
        await self._delete_others(owner, key, {step.key for step in steps})
        decisions: list[Decision] = []
        quality = ""
        for step in steps:
            answer = self._recorded(owner, key, step)
            if answer is None:
                answer = await self._take(owner, key, steps, step, plan, source, decisions)
                await self._apply(owner, [preparation_record(owner, step.key, answer)], plan)
            await self._children.delete(owner, self._jobs(owner, key, step))
            if step.kind is StepKind.QUANTIZE:
                decisions.append(step_messages.quantized(answer, plan.model_path, _predicted_bytes(owner, source)))
                continue
            decisions.append(step_messages.judged(answer, plan.model_path))
            gate = gate_of(owner)
            if not has_passed(answer) and (gate is None or gate.mode is not GateMode.OBSERVE):
                raise NotPrepared(step_messages.gate_failed(owner, answer), plan.status_plan(), None, decisions)
            quality = step_messages.gate_in_words(answer)
        return Prepared(quality, tuple(decisions))

    async def stop(self, owner: LLMDeployment, key: OwnerKey) -> None:
        """Delete the Jobs of an older spec: the new one asks for nothing."""
        await self._children.delete(owner, self._all_jobs(owner, key))

    def known(self, owner: LLMDeployment, key: OwnerKey, path: str, revision: str | None) -> Prepared:
        """Return what is on record of a model that serves. `path`, `revision`: of its plan."""
        gates = [one for one in steps_of(owner, path, revision) if one.kind is StepKind.JUDGE]
        if not gates:
            return Prepared()
        answer = self._recorded(owner, key, gates[0])
        return Prepared(step_messages.gate_in_words(answer) if answer is not None else NOT_JUDGED)

    def _recorded(self, owner: LLMDeployment, key: OwnerKey, step: Step) -> Manifest | None:
        """Return the answer on record; None for that of another version of the operator, too."""
        text = recorded_text(self._children.list_owned(owner, key, CONFIG_MAP), step.key)
        answer = read_step_answer(step.kind, text) if text is not None else None
        return None if isinstance(answer, Diagnosis) else answer

    def _jobs(self, owner: LLMDeployment, key: OwnerKey, step: Step) -> list[Manifest]:
        return [job for job in self._all_jobs(owner, key) if _prepares(job) == step.key]

    def _all_jobs(self, owner: LLMDeployment, key: OwnerKey) -> list[Manifest]:
        """Return the Jobs that prepare a model; those of another role are not the preparer's."""
        return [job for job in self._children.list_owned(owner, key, JOB) if role_of(job) == PREPARER]

    async def _delete_others(self, owner: LLMDeployment, key: OwnerKey, keys: set[str]) -> None:
        """Stop what an older spec asked for, and delete its oldest records."""
        others = [job for job in self._all_jobs(owner, key) if _prepares(job) not in keys]
        records = outdated_records(self._children.list_owned(owner, key, CONFIG_MAP))
        await self._children.delete(owner, [*others, *(dict(one) for one in records)])

    async def _take(
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

        jobs = self._jobs(owner, key, step)
        todays = [job for job in jobs if job["metadata"]["name"] == attempt(attempt_of(job))["metadata"]["name"]]
        work = step_messages.work_of(owner, steps, step, todays)
        next_one = next_job_step(work, todays, self._index.children(key, POD), self._now())
        if next_one.answer is not None:
            return next_one.answer
        if next_one.start is not None:
            await self._apply(owner, [*self._needed(owner), attempt(next_one.start)], plan)
        outdated = [job for job in jobs if job not in todays]
        await self._children.delete(owner, [*outdated, *next_one.to_delete])
        problem = next_one.problem or work.under_way
        if problem != work.under_way:
            problem = step_messages.failed(owner, step, problem)
        announced = [*decisions, step_messages.started(owner, step, plan.model_path)]
        raise NotPrepared(problem, plan.status_plan(), next_one.recheck_seconds, announced)

    def _needed(self, owner: LLMDeployment) -> list[Manifest]:
        """Return what a pod of a Job needs: an account, a policy where the namespace denies traffic, and the cache."""
        around = self._surroundings()
        policy = network_policy(owner, around.network, around.operator_namespace, around.api_servers)
        return [one for one in (service_account(owner), policy, model_cache(owner)) if one is not None]

    async def _apply(self, owner: LLMDeployment, wanted: Sequence[Manifest], plan: Plan) -> None:
        if (problem := await self._children.apply_all(owner, wanted)) is not None:
            raise NotPrepared(problem, plan.status_plan(), RECHECK_SECONDS)


def _prepares(job: Manifest) -> str | None:
    """Return the key of the step that a Job takes."""
    found: str | None = job["metadata"].get("labels", {}).get(PREPARATION_LABEL)
    return found


def _predicted_bytes(owner: LLMDeployment, source: InspectedModel | None) -> int | None:
    """Return the bytes of the weights that the plan counts with; None where the source was not inspected."""
    shape = as_made(owner.spec, Facts(source.shape)).shape if source is not None else None
    return weights_file_bytes(shape) if shape is not None else None
