"""Tune a draft model while it serves, and say which draft the pods may load.

    nothing asked for ..................... the draft as it is
    no answer yet, or the Job failed ...... whichever draft serves now
    better ................................ the tuned draft: another revision, rolled out as any other
    not better ............................ the draft as it is

The Job begins once the pinned revision has answered, and takes that revision's models and image, so that neither the
first pods nor an upgrade of the operator wait for it. It runs once per inputs, by `step_runner.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.children.children import Children
from millstream_operator.diagnosis.conditions import DRAFT_TUNED, Condition, find
from millstream_operator.diagnosis.decisions import Decision
from millstream_operator.diagnosis.plan_refused import RECHECK_SECONDS
from millstream_operator.facts.job_attempts import JobWork
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.planning.inspected import Inspected
from millstream_operator.preparation import tuning_messages
from millstream_operator.preparation.step_answers import is_better
from millstream_operator.preparation.step_runner import StepRunner
from millstream_operator.rendering.names import TUNER
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.preparation_job import Step, StepKind
from millstream_operator.rendering.revision import Revision
from millstream_operator.rendering.surroundings import Surroundings
from millstream_operator.rendering.tuning_job import DraftPair, tuning_job, tuning_key

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DraftState:
    """`drafts`: those of which pods may load one, by the key of their tuning, None for the draft as it is; None: any.

    `chosen`: the one that a new plan takes. `waits_for_answer`: the Job begins once the pinned revision has answered.
    """

    drafts: frozenset[str | None] | None
    chosen: str | None = None
    condition: Condition | None = None
    decisions: tuple[Decision, ...] = ()
    recheck_seconds: float | None = None
    waits_for_answer: bool = False

    def allows(self, draft: str | None) -> bool:
        return self.drafts is None or draft in self.drafts


NOT_TUNED = DraftState(frozenset({None}))  # the spec asks for no tuning


class DraftTuner:
    """Tunes an owner's draft, for the reconciler."""

    def __init__(
        self,
        children: Children,
        index: Index,
        pod_defaults: PodDefaults,
        now: Callable[[], str],
        surroundings: Callable[[], Surroundings] = Surroundings,
        recheck_seconds: float = RECHECK_SECONDS,
    ) -> None:
        self._pod_defaults = pod_defaults
        self._steps = StepRunner(children, index, now, surroundings, TUNER, recheck_seconds)

    async def stop(self, owner: LLMDeployment, key: OwnerKey) -> None:
        """Delete the Jobs of an older spec: the new one asks for nothing."""
        await self._steps.stop(owner, key)

    async def ask(
        self,
        owner: LLMDeployment,
        key: OwnerKey,
        pair: DraftPair,
        answered: Revision | None,
        inspected: Inspected,
        previous: Mapping[str, Any],
    ) -> DraftState:
        """Return the state, and take the next step. `answered`: the pinned revision, once it has; `previous`: the
        status before."""
        name = tuning_key(owner, pair)
        if name is None:
            return NOT_TUNED
        step = Step(StepKind.TUNE, name)
        await self._steps.delete_others(owner, key, {name})
        if self._steps.recorded(owner, key, step) is None and answered is None:
            return DraftState(None, condition=tuning_messages.waiting(), waits_for_answer=True)

        def attempt(number: int) -> Manifest:
            assert answered is not None  # noqa: S101 - there is a record where it is None
            return tuning_job(owner, step, answered, inspected, self._pod_defaults, number)

        def work_of(jobs: Sequence[Manifest]) -> JobWork:
            return tuning_messages.work_of(owner, step, jobs)

        state = await self._steps.run(owner, key, step, attempt, work_of)
        if state.answer is None:
            assert state.problem is not None  # noqa: S101 - no answer
            condition = tuning_messages.under_way(owner, state.problem)
            made = (tuning_messages.started(owner, step),)
            return DraftState(None, None, condition, _news(previous, condition, made), state.recheck_seconds)
        chosen = name if is_better(state.answer) else None
        condition = tuning_messages.decided(state.answer)
        made = (tuning_messages.outcome(state.answer, step),)
        return DraftState(frozenset({chosen}), chosen, condition, _news(previous, condition, made))


def _news(previous: Mapping[str, Any], condition: Condition, made: tuple[Decision, ...]) -> tuple[Decision, ...]:
    """Return what the journal may lack: it is written together with the condition."""
    before = find(previous.get("conditions") or (), DRAFT_TUNED)
    return () if (before.get("reason"), before.get("message")) == (condition.reason, condition.message) else made
