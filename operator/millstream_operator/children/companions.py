"""Apply a model's companions: one autoscaler and two monitors, of the kinds that the cluster serves.

    spec, served kinds -> wanted companions -> delete ours that are not wanted -> apply -> conditions

A problem here sets the conditions `Autoscaled` and `Monitored` and does not make the model unready: it still serves. A
refusal (a missing kind, a budget that does not pay for minReplicas) leaves the existing autoscaler as it is. A budget
that pays for fewer than maxReplicas bounds the autoscaler's maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.children.autoscaled import autoscaled
from millstream_operator.children.children import Children, namespace_is_terminating
from millstream_operator.diagnosis import conditions
from millstream_operator.diagnosis.conditions import Condition
from millstream_operator.diagnosis.decisions import Decision, DecisionType
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.kube.client import ApiError
from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.kinds import (
    HORIZONTAL_POD_AUTOSCALER,
    OPTIONAL,
    POD_MONITOR,
    PROMETHEUS_RULE,
    SCALED_OBJECT,
    Kind,
    kind_of,
)
from millstream_operator.planning.scaling_cost import bounded_maximum, over_budget
from millstream_operator.rendering.companions import (
    CompanionDefaults,
    NoAutoscaler,
    autoscaler,
    is_monitored,
    monitors,
)

Manifest = dict[str, Any]
AUTOSCALERS = (HORIZONTAL_POD_AUTOSCALER, SCALED_OBJECT)
MONITORS = (POD_MONITOR, PROMETHEUS_RULE)
RETRYABLE = (409, 429)  # retried at once, from fresh state


class ServedKinds(Protocol):
    """The optional kinds that the last discovery found (`optional_kinds.py`)."""

    @property
    def names(self) -> frozenset[str]: ...


@dataclass(frozen=True, slots=True)
class CompanionResult:
    """The result of a turn. `problem`: an error that a retry may mend."""

    conditions: tuple[Condition, ...] = ()
    decisions: tuple[Decision, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CompanionInput:
    """The input of one turn."""

    owner: LLMDeployment
    key: OwnerKey
    plan: Mapping[str, Any]  # status.plan
    previous: Sequence[Manifest] = ()  # conditions of the previous status


class CompanionApplier:
    """Applies companions, for the reconciler."""

    def __init__(self, children: Children, served: ServedKinds, defaults: CompanionDefaults) -> None:
        self._children, self._served, self._defaults = children, served, defaults

    async def apply_all(self, turn: CompanionInput) -> CompanionResult:
        """Apply autoscaler and monitors as far as possible, and return what the status says of them.

        Raises:
            ApiError, ApiUnreachable, RetryLater: an error that a retry may not meet again.
        """
        parts = [await self._autoscaler(turn), await self._monitors(turn)]
        found = [condition for part in parts for condition in part.conditions]
        conflicts = [one for one in found if one.reason is Reason.NAME_CONFLICT]
        if conflicts:
            message = " ".join(one.message for one in conflicts)
            found.append(Condition(conditions.NAME_CONFLICT, True, Reason.NAME_CONFLICT, message))
        return CompanionResult(
            tuple(found),
            tuple(decision for part in parts for decision in part.decisions),
            " ".join(part.problem for part in parts if part.problem),
        )

    # The autoscaler

    async def _autoscaler(self, turn: CompanionInput) -> CompanionResult:
        owner = within_budget(turn)
        wanted = autoscaler(owner, self._served.names, self._defaults)
        if isinstance(wanted, NoAutoscaler):
            return _one(conditions.AUTOSCALED, Diagnosis(Reason.AUTOSCALER_UNAVAILABLE, wanted.message))
        message = over_budget(turn.plan, owner.spec) if bounded_maximum(turn.plan, owner.spec) is None else None
        if message is not None:
            return _one(conditions.AUTOSCALED, Diagnosis(Reason.BUDGET_EXCEEDED, message))
        # Delete the other autoscaler first: two would fight over the replicas, and KEDA refuses to be the second.
        manifests = [wanted.manifest] if wanted is not None else []
        problem = await self._apply_kinds(turn, AUTOSCALERS, manifests)
        if wanted is None:
            return CompanionResult(problem=problem.message if problem else "")
        chosen = (Decision(DecisionType.AUTOSCALER_CHOSEN, wanted.chosen),) if wanted.chosen else ()
        if problem is not None:
            return _one(conditions.AUTOSCALED, problem, retry=True)
        live = self._children.get_owned(owner, turn.key, kind_of(wanted.manifest)) or wanted.manifest
        return CompanionResult((autoscaled(owner, live),), chosen)

    # The monitors

    async def _monitors(self, turn: CompanionInput) -> CompanionResult:
        owner = turn.owner
        wanted = monitors(owner, self._served.names, self._defaults)
        problem = await self._apply_kinds(turn, MONITORS, wanted)
        if problem is not None:
            return _one(conditions.MONITORED, problem, retry=True)
        if not is_monitored(owner):
            return CompanionResult()
        missing = [kind.kind for kind in MONITORS if kind.kind not in {one["kind"] for one in wanted}]
        if not wanted and owner.spec.monitoring is None and not _was_reported(turn):
            return CompanionResult()  # monitoring was not asked for and not lost: no condition
        lacking = f"The API server serves no {' and no '.join(missing)}" if missing else ""
        if not wanted:
            message = f"{lacking} (monitoring.coreos.com/v1): no scraping and no alerts by the Prometheus operator."
            return _one(conditions.MONITORED, Diagnosis(Reason.MONITORING_UNAVAILABLE, message))
        there = " and ".join(one["kind"] for one in wanted)
        message = f"{there} {owner.name} {'are' if len(wanted) > 1 else 'is'} there.{f' {lacking}.' if lacking else ''}"
        return CompanionResult((Condition(conditions.MONITORED, True, Reason.MONITORED, message),))

    # Both

    async def _apply_kinds(
        self, turn: CompanionInput, kinds: Sequence[Kind], wanted: Sequence[Manifest]
    ) -> Diagnosis | None:
        """Delete our objects of these kinds that are not wanted, then apply those that are."""
        names = {(one["kind"], one["metadata"]["name"]) for one in wanted}
        for kind in kinds:
            mine = self._children.list_owned(turn.owner, turn.key, kind)
            to_delete = [one for one in mine if (kind.kind, one["metadata"]["name"]) not in names]
            if (
                to_delete
                and (problem := await self._attempt(kind.kind, self._deletion(turn.owner, to_delete))) is not None
            ):
                return problem
        attempts = [await self._attempt(one["kind"], self._application(turn.owner, one)) for one in wanted]
        return next((problem for problem in attempts if problem is not None), None)

    def _deletion(self, owner: LLMDeployment, to_delete: Sequence[Manifest]) -> Callable[[], Any]:
        return lambda: self._children.delete(owner, to_delete)

    def _application(self, owner: LLMDeployment, manifest: Manifest) -> Callable[[], Any]:
        return lambda: self._children.apply_all(owner, [manifest])

    async def _attempt(self, kind: str, act: Callable[[], Any]) -> Diagnosis | None:
        """Turn an error that may stay into a diagnosis, so that the status is still written."""
        try:
            found: Diagnosis | None = await act()
        except ApiError as error:
            if error.status in RETRYABLE or namespace_is_terminating(error):
                raise
            if error.status == 404 and kind in {one.kind for one in OPTIONAL}:
                return Diagnosis(_not_served(kind), f"The API server no longer serves {kind}.")
            return Diagnosis(
                Reason.APPLY_REFUSED, f"The API server refuses the {kind} ({error.status}): {error.message}"
            )
        return found


def within_budget(turn: CompanionInput) -> LLMDeployment:
    """Return the owner with the maximum that an enforced budget pays for; unchanged where it pays for none."""
    spec, scaling = turn.owner.spec, turn.owner.spec.autoscaling
    bound = bounded_maximum(turn.plan, spec)
    if scaling is None or bound is None or bound == scaling.max_replicas:
        return turn.owner
    bounded = scaling.model_copy(update={"max_replicas": bound})
    return turn.owner.model_copy(update={"spec": spec.model_copy(update={"autoscaling": bounded})})


def _was_reported(turn: CompanionInput) -> bool:
    """Return whether it was monitored, or this generation of the spec already has the condition."""
    before = conditions.find(turn.previous, conditions.MONITORED)
    same_generation = before.get("observedGeneration") == turn.owner.metadata.generation
    return bool(before) and (same_generation or before["status"] == "True")


def _not_served(kind: str) -> Reason:
    return Reason.AUTOSCALER_UNAVAILABLE if kind == SCALED_OBJECT.kind else Reason.MONITORING_UNAVAILABLE


def _one(condition: str, problem: Diagnosis, *, retry: bool = False) -> CompanionResult:
    found = (Condition(condition, False, problem.reason, problem.message),)
    return CompanionResult(found, problem=problem.message if retry else "")
