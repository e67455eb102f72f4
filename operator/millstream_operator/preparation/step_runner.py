"""Do one step of work in a Job, once: from its record, or from attempts that `facts/job_attempts.py` decides about.

A record is written before its Job is deleted, and a new attempt is created before an old one is deleted: after a crash
at any point, the next turn finds either the answer or the Job. A step whose record exists is not done again. What was
made in a volume of `model.cache` that is gone by then gets no record: it is made again before a pod loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.children.children import Children
from millstream_operator.children.job_needs import needed_by_job
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.plan_refused import RECHECK_SECONDS
from millstream_operator.facts.job_attempts import JobWork, attempt_of, mounted_after, next_job_step
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import CONFIG_MAP, JOB, PERSISTENT_VOLUME_CLAIM, POD
from millstream_operator.preparation.step_answers import read_step_answer
from millstream_operator.rendering.model_cache import cache_claim_name, model_cache
from millstream_operator.rendering.names import PREPARATION_LABEL, role_of
from millstream_operator.rendering.preparation_job import Step, StepKind
from millstream_operator.rendering.preparation_record import (
    is_lost,
    outdated_records,
    preparation_record,
    record_of_step,
    recorded_text,
)
from millstream_operator.rendering.surroundings import Surroundings

Manifest = dict[str, Any]
MADE_IN_CACHE = frozenset({StepKind.QUANTIZE, StepKind.TUNE})  # the others answer, and make nothing


@dataclass(frozen=True, slots=True)
class StepState:
    """`answer`: what the step's pod said. `problem`: why there is none yet; `is_refused`: its objects were refused."""

    answer: Manifest | None = None
    problem: Diagnosis | None = None
    recheck_seconds: float | None = None
    is_refused: bool = False


class StepRunner:
    """For the Jobs of one role, of all owners."""

    def __init__(
        self,
        children: Children,
        index: Index,
        now: Callable[[], str],
        surroundings: Callable[[], Surroundings],
        role: str,
        recheck_seconds: float = RECHECK_SECONDS,
    ) -> None:
        self._children, self._index, self._now = children, index, now
        self._surroundings, self._role, self._recheck_seconds = surroundings, role, recheck_seconds

    async def run(
        self,
        owner: LLMDeployment,
        key: OwnerKey,
        step: Step,
        attempt: Callable[[int], Manifest],
        work_of: Callable[[Sequence[Manifest]], JobWork],
    ) -> StepState:
        """Return the answer if there is one; else do what is next.

        Args:
            attempt: the Job of an attempt, by its number.
            work_of: what the Jobs do, in the words of the status, from those that exist.
        """
        answer = self.recorded(owner, key, step)
        if answer is None:
            state = await self._take(owner, key, step, attempt, work_of)
            if state.answer is None:
                return state
            answer = self._with_circumstances(owner, key, step, state.answer)
            cache_uid = self._filled_uid(owner, key, step) if step.kind in MADE_IN_CACHE else None
            if step.kind in MADE_IN_CACHE and cache_uid is None:
                jobs = self._jobs_of(owner, key, step)
                await self._children.delete(owner, jobs)
                return StepState(None, work_of(jobs).under_way, self._recheck_seconds)
            record = preparation_record(owner, step.key, answer, cache_uid)
            await self._children.delete(owner, self._lost(owner, key, step))
            if (problem := await self._children.apply_all(owner, [record])) is not None:
                return StepState(None, problem, self._recheck_seconds, is_refused=True)
        await self._children.delete(owner, self._jobs_of(owner, key, step))
        return StepState(answer)

    def _with_circumstances(self, owner: LLMDeployment, key: OwnerKey, step: Step, answer: Manifest) -> Manifest:
        """Return the answer with the time, and with the image of the Job, where a verdict depends on them."""
        if step.kind is not StepKind.JUDGE:
            return answer
        newest = max(self._jobs_of(owner, key, step), key=attempt_of, default=None)
        image = None if newest is None else newest["spec"]["template"]["spec"]["containers"][0]["image"]
        return answer | {"judgedAt": self._now()} | ({"image": image} if image is not None else {})

    def recorded(self, owner: LLMDeployment, key: OwnerKey, step: Step) -> Manifest | None:
        """Return the answer on record; None for that of another version of the operator, and of a volume that is gone,
        too."""
        if self._lost(owner, key, step):
            return None
        text = recorded_text(self._children.list_owned(owner, key, CONFIG_MAP), step.key)
        answer = read_step_answer(step.kind, text) if text is not None else None
        return None if isinstance(answer, Diagnosis) else answer

    def is_made_again(self, owner: LLMDeployment, key: OwnerKey, step: Step) -> bool:
        """Whether what the step made for pods that serve is gone with its volume, and there is another, or a Job makes
        it again already. A claim that is being deleted stays until its pods have left it, so nothing is gone yet."""
        if self.recorded(owner, key, step) is not None or self._cache_uid(owner, key) is None:
            return False
        return bool(self._lost(owner, key, step) or self._jobs_of(owner, key, step))

    async def stop(self, owner: LLMDeployment, key: OwnerKey, but: Collection[str] = ()) -> None:
        """Delete the Jobs of an older spec. `but`: the keys of the steps of today's."""
        await self._children.delete(owner, [job for job in self._jobs(owner, key) if _step_key(job) not in but])

    async def delete_others(self, owner: LLMDeployment, key: OwnerKey, keys: Collection[str]) -> None:
        """Stop what an older spec asked for, and delete the oldest records.

        `keys`: of the steps of today's.
        """
        await self.stop(owner, key, keys)
        records = outdated_records(self._children.list_owned(owner, key, CONFIG_MAP))
        await self._children.delete(owner, map(dict, records))

    def _lost(self, owner: LLMDeployment, key: OwnerKey, step: Step) -> list[Manifest]:
        """Return the record of the step where what it made is in no volume any more. It is deleted when the step is
        done again: until then it says that there was something."""
        if step.kind not in MADE_IN_CACHE:
            return []
        record = record_of_step(self._children.list_owned(owner, key, CONFIG_MAP), step.key)
        lost = record is not None and is_lost(record, self._cache_uid(owner, key))
        return [dict(record)] if record is not None and lost else []

    def _cache_uid(self, owner: LLMDeployment, key: OwnerKey) -> str | None:
        """Return the uid of the claim of `model.cache`; None where there is none, or it is being deleted."""
        claim = self._cache_claim(owner, key)
        return None if claim is None or claim["metadata"].get("deletionTimestamp") else str(claim["metadata"]["uid"])

    def _filled_uid(self, owner: LLMDeployment, key: OwnerKey, step: Step) -> str | None:
        """Return the uid of the claim that a Job has just filled; None where that one is gone, or goes with the Job.

        Today's may be another: where somebody takes away its finalizers, a claim goes while a pod writes into its
        volume, and the operator makes the next.
        """
        claim, jobs = self._cache_claim(owner, key), self._jobs_of(owner, key, step)
        if claim is None or not jobs:
            return None
        is_filled = mounted_after(claim, max(jobs, key=attempt_of), self._index.children(key, POD))
        return self._cache_uid(owner, key) if is_filled else None

    def _cache_claim(self, owner: LLMDeployment, key: OwnerKey) -> Manifest | None:
        return self._children.get_owned(owner, key, PERSISTENT_VOLUME_CLAIM, cache_claim_name(owner))

    def _jobs(self, owner: LLMDeployment, key: OwnerKey) -> list[Manifest]:
        """Return the Jobs of this runner's role; others are not its own."""
        return [job for job in self._children.list_owned(owner, key, JOB) if role_of(job) == self._role]

    def _jobs_of(self, owner: LLMDeployment, key: OwnerKey, step: Step) -> list[Manifest]:
        return [job for job in self._jobs(owner, key) if _step_key(job) == step.key]

    async def _take(
        self,
        owner: LLMDeployment,
        key: OwnerKey,
        step: Step,
        attempt: Callable[[int], Manifest],
        work_of: Callable[[Sequence[Manifest]], JobWork],
    ) -> StepState:
        jobs = self._jobs_of(owner, key, step)
        todays = [job for job in jobs if job["metadata"]["name"] == attempt(attempt_of(job))["metadata"]["name"]]
        work = work_of(todays)
        next_one = next_job_step(work, todays, self._index.children(key, POD), self._now())
        if next_one.answer is not None:
            return StepState(next_one.answer)
        started = [attempt(next_one.start)] if next_one.start is not None else []
        if (problem := await self._children.apply_all(owner, [*self._needed(owner, key), *started])) is not None:
            return StepState(None, problem, self._recheck_seconds, is_refused=True)
        outdated = [job for job in jobs if job not in todays]
        await self._children.delete(owner, [*outdated, *next_one.to_delete])
        return StepState(None, next_one.problem or work.under_way, next_one.recheck_seconds)

    def _needed(self, owner: LLMDeployment, key: OwnerKey) -> list[Manifest]:
        """Return what the pod of a Job needs, the cache included."""
        cache = model_cache(owner)
        needed = needed_by_job(self._children, owner, key, self._surroundings())
        return needed if cache is None else [*needed, cache]


def _step_key(job: Manifest) -> str | None:
    """Return the key of the step that a Job takes."""
    found: str | None = job["metadata"].get("labels", {}).get(PREPARATION_LABEL)
    return found
