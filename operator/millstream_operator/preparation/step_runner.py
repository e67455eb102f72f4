"""Do one step of work in a Job, once: from its record, or from attempts that `facts/job_attempts.py` decides about.

A record is written before its Job is deleted, and a new attempt is created before an old one is deleted: after a crash
at any point, the next turn finds either the answer or the Job. A step whose record exists is not done again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.children.children import Children
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.facts.job_attempts import JobWork, attempt_of, next_job_step
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import CONFIG_MAP, JOB, PERSISTENT_VOLUME_CLAIM, POD
from millstream_operator.preparation.step_answers import read_step_answer
from millstream_operator.rendering.model_cache import cache_claim_name, model_cache
from millstream_operator.rendering.names import PREPARATION_LABEL, role_of
from millstream_operator.rendering.network_policy import network_policy
from millstream_operator.rendering.preparation_job import Step, StepKind
from millstream_operator.rendering.preparation_record import (
    lost_records,
    outdated_records,
    preparation_record,
    recorded_text,
)
from millstream_operator.rendering.service_account import service_account
from millstream_operator.rendering.surroundings import Surroundings

Manifest = dict[str, Any]
RECHECK_SECONDS = 30.0
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
    ) -> None:
        self._children, self._index, self._now = children, index, now
        self._surroundings, self._role = surroundings, role

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
            answer = state.answer
            cache_uid = self._cache_uid(owner, key) if step.kind in MADE_IN_CACHE else None
            record = preparation_record(owner, step.key, answer, cache_uid)
            if (problem := await self._children.apply_all(owner, [record])) is not None:
                return StepState(None, problem, RECHECK_SECONDS, is_refused=True)
        await self._children.delete(owner, self._jobs_of(owner, key, step))
        return StepState(answer)

    def recorded(self, owner: LLMDeployment, key: OwnerKey, step: Step) -> Manifest | None:
        """Return the answer on record; None for that of another version of the operator, too."""
        text = recorded_text(self._children.list_owned(owner, key, CONFIG_MAP), step.key)
        answer = read_step_answer(step.kind, text) if text is not None else None
        return None if isinstance(answer, Diagnosis) else answer

    async def stop(self, owner: LLMDeployment, key: OwnerKey) -> None:
        """Delete the Jobs of an older spec: the new one asks for nothing."""
        await self._children.delete(owner, self._jobs(owner, key))

    async def delete_others(self, owner: LLMDeployment, key: OwnerKey, keys: Collection[str]) -> None:
        """Stop what an older spec asked for, and delete its oldest records and those whose volume is gone.

        `keys`: of the steps of today's.
        """
        others = [job for job in self._jobs(owner, key) if _step_key(job) not in keys]
        stored = self._children.list_owned(owner, key, CONFIG_MAP)
        found = (*outdated_records(stored), *lost_records(stored, self._cache_uid(owner, key)))
        records = {one["metadata"]["name"]: dict(one) for one in found}
        await self._children.delete(owner, [*others, *records.values()])

    def _cache_uid(self, owner: LLMDeployment, key: OwnerKey) -> str | None:
        """Return the uid of the claim of `model.cache`; None where there is none, or it is being deleted."""
        claim = self._children.get_owned(owner, key, PERSISTENT_VOLUME_CLAIM, cache_claim_name(owner))
        if claim is None or claim["metadata"].get("deletionTimestamp"):
            return None
        return str(claim["metadata"]["uid"])

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
        if (problem := await self._children.apply_all(owner, [*self._needed(owner), *started])) is not None:
            return StepState(None, problem, RECHECK_SECONDS, is_refused=True)
        outdated = [job for job in jobs if job not in todays]
        await self._children.delete(owner, [*outdated, *next_one.to_delete])
        return StepState(None, next_one.problem or work.under_way, next_one.recheck_seconds)

    def _needed(self, owner: LLMDeployment) -> list[Manifest]:
        """Return what the pod of a Job needs: an account, a policy where the namespace denies traffic, and the cache.

        Also while it waits: somebody may have deleted one of them.
        """
        around = self._surroundings()
        policy = network_policy(owner, around.network, around.operator_namespace, around.api_servers)
        return [one for one in (service_account(owner), policy, model_cache(owner)) if one is not None]


def _step_key(job: Manifest) -> str | None:
    """Return the key of the step that a Job takes."""
    found: str | None = job["metadata"].get("labels", {}).get(PREPARATION_LABEL)
    return found
