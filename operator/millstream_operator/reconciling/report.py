"""Stage "report": write the status, and Events for what changed in it.

A status is one patch, and only if something changed: our own write wakes us again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.children.children import controller_uid
from millstream_operator.children.companions import CompanionResult
from millstream_operator.diagnosis.conditions import Condition
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.plan_refused import PlanRefused
from millstream_operator.kube.client import ClusterClient
from millstream_operator.kube.event_queue import EventPublisher, EventWriter
from millstream_operator.kube.index import Index
from millstream_operator.leadership.ownership import Release
from millstream_operator.probing.drafting_reports import DraftingReports
from millstream_operator.probing.pod_reports import PodReports
from millstream_operator.reconciling.context import ReconcileContext
from millstream_operator.reconciling.status_writer import StatusWriter
from millstream_operator.status.budget import budget_condition
from millstream_operator.status.events import decision_events, event_for, event_for_object
from millstream_operator.status.observation import Observation
from millstream_operator.status.speculation import governed, known_drafting
from millstream_operator.status.status import status_of, status_of_invalid, status_of_terminating
from millstream_operator.status.warmup import loading
from millstream_operator.workloads.deployments import DEPLOYMENTS
from millstream_operator.workloads.workload import Workload, state_of

Manifest = dict[str, Any]


class ReportStage:
    """`reports` knows how far the pods have warmed up, `drafting` whether they draft; `events` takes Events that may be
    written later. `release`: what every status records as its writer."""

    def __init__(
        self,
        client: ClusterClient,
        index: Index,
        reports: PodReports,
        now: Callable[[], str],
        events: EventPublisher | None = None,
        workloads: Workload = DEPLOYMENTS,
        drafting: DraftingReports | None = None,
        release: Release | None = None,
    ) -> None:
        self._index, self._reports, self._now, self._workloads = index, reports, now, workloads
        self._drafting = drafting
        self._writer = StatusWriter(client, index, now, release)
        self._before_acting = EventWriter(client)
        self._events = events or self._before_acting

    async def announce(self, context: ReconcileContext) -> None:
        """Write the decisions of a rollout before it begins: they explain why the first pod is drained."""
        decisions = (*context.prepared.decisions, *context.draft.decisions, *context.rollout.decisions)
        if not decisions:
            return
        observation = Observation(
            context.owner,
            context.rollout.pin.revision,
            context.workload,
            context.pods,
            previous=context.previous,
            decisions=decisions,
            rollout=context.rollout,
            outdated=context.plan.outdated,
            unknown_fields=context.unknown_fields,
            asked_replicas=context.asked_replicas,
            workloads=context.workloads,
            draft_tuned=context.draft.condition,
        )
        await self._write(context, observation)

    async def run(self, context: ReconcileContext) -> None:
        """Write the status of the whole turn, and follow the pods that warm up."""
        companions = context.companions or CompanionResult()
        observation = Observation(
            context.owner,
            context.plan.pin.revision,
            context.workload,
            context.pods,
            context.answer,
            context.problem,
            context.previous,
            decisions=(*context.plan.decisions, *companions.decisions),
            companions=companions.conditions,
            reports=self._reports.of(context.key),
            rollout=context.rollout,
            outdated=context.plan.outdated,
            advancing=context.advancing,
            lacks_gpus=context.lacks_gpus,
            unknown_fields=context.unknown_fields,
            asked_replicas=context.asked_replicas,
            workloads=context.workloads,
            compared=context.compared,
            quality=context.prepared.quality,
            draft_tuned=context.draft.condition,
        )
        self._reports.follow(context.key, loading(observation.own_pods))
        await self._write(context, self._with_drafting(context, observation))

    def _with_drafting(self, context: ReconcileContext, observation: Observation) -> Observation:
        """Follow the pods that speculate. What the status says of them holds until they were asked."""
        if self._drafting is None:
            return observation
        running = observation.running
        known = known_drafting(context.previous, running, self._now())
        drafting, seconds = (known.drafting, known.seconds) if known is not None else (None, 0.0)
        self._drafting.follow(context.key, running.name, governed(observation), drafting, seconds)
        return replace(observation, drafting=self._drafting.of(context.key))

    async def _write(self, context: ReconcileContext, observation: Observation) -> None:
        owner, before = context.owner, context.previous
        after = {name: value for name, value in status_of(observation, self._now()).items() if value is not None}
        after = self._writer.acceptable(context.uid, after, before)
        if {name: before.get(name) for name in after} == after and before.keys() <= after.keys():
            return
        after = await self._writer.write(_identity(owner), after, before)
        for event in decision_events(owner, before, after, self._now()):
            await self._before_acting.publish(event)
        if (change := event_for(owner, before, after, self._now())) is not None:
            await self._events.publish(change)

    async def run_invalid(
        self,
        manifest: Manifest,
        problem: Diagnosis,
        plan: Manifest | None = None,
        kept: ReconcileContext | None = None,
        refused: PlanRefused | None = None,
    ) -> None:
        """Write the status of a spec that cannot be read or has no plan.

        `plan`: what was planned and not applied. `kept`: the turn, which keeps the last good revision as it is.
        `refused`: what else is to be said.
        """
        metadata, previous = manifest["metadata"], manifest.get("status") or {}
        live = self._index.get(self._workloads.kind, metadata["namespace"], metadata["name"])
        is_own = live is not None and controller_uid(live) == metadata["uid"]
        state = state_of(self._workloads, live) if is_own else None
        conditions = _of_what_is_kept(kept) if kept is not None else None
        generation = metadata.get("generation", 0)
        also, decisions = (refused.conditions, refused.decisions) if refused is not None else ((), ())
        after = status_of_invalid(
            previous, generation, problem, self._now(), plan, state, conditions, also=also, decisions=decisions
        )
        after = self._writer.acceptable(metadata["uid"], after, previous)
        if after == previous:
            return
        after = await self._writer.write(manifest, after, previous)
        for event in decision_events(kept.owner, previous, after, self._now()) if kept is not None else ():
            await self._before_acting.publish(event)
        if (change := event_for_object(metadata, previous, after, self._now())) is not None:
            await self._events.publish(change)

    async def run_terminating(self, manifest: Manifest) -> None:
        """Write that an object is being deleted, once it has a status: it may wait long for a finalizer."""
        previous, metadata = manifest.get("status") or {}, manifest["metadata"]
        if not previous.get("conditions"):
            return
        after = self._writer.acceptable(
            metadata["uid"], status_of_terminating(previous, metadata, self._now()), previous
        )
        if after != previous:
            await self._writer.write(manifest, after, previous)

    def forget(self, uid: str) -> None:
        """The LLMDeployment is gone."""
        self._writer.forget(uid)


def _of_what_is_kept(context: ReconcileContext) -> tuple[Condition, ...] | None:
    """The conditions of the companions, and of replicas that the budget holds back; None where nothing was applied."""
    if context.companions is None:
        return None
    plan, asked = context.running.plan, context.asked_replicas
    held = budget_condition(context.owner, plan, asked) if asked is not None else None
    return (*context.companions.conditions, *([held] if held is not None else []))


def _identity(owner: LLMDeployment) -> Manifest:
    metadata = {"name": owner.name, "namespace": owner.metadata.namespace, "uid": owner.metadata.uid or ""}
    return {"apiVersion": owner.api_version, "kind": owner.kind, "metadata": metadata}
