"""`reconcile(key)`: make the cluster hold what one LLMDeployment says, and write down what is.

    index -> parse -> pinned revision -> intent of the rollout -> apply what differs -> prune -> ask the model -> status

Level-triggered: it looks at everything each time and remembers nothing that it could not find out again, so it may
be killed before or after any of its writes. Reads come from the index; a live GET comes before anything destructive.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import ManifestError, parse
from millstream_operator.children.children import Children, controller_uid, namespace_is_terminating
from millstream_operator.children.claims import Claims
from millstream_operator.children.companions import CompanionInput, Companions, CompanionsOf, ServedKinds
from millstream_operator.diagnosis import conditions
from millstream_operator.diagnosis.conditions import find
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.plan_refused import PlanRefused
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.facts import restored_status
from millstream_operator.facts.cluster_facts import FactsSource, NoFacts
from millstream_operator.facts.inspector import Inspector
from millstream_operator.facts.restored_status import Later, RestoredStatus, StatusRestorer
from millstream_operator.facts.shared_inspections import SharedInspections
from millstream_operator.kube.client import ApiError, ApiUnreachable, ClusterClient
from millstream_operator.kube.event_queue import EventWriter, Publisher
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import (
    CONFIG_MAP,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    LLM_DEPLOYMENT,
    OWNED,
    PERSISTENT_VOLUME_CLAIM,
    POD,
)
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.probing.answer import Answer
from millstream_operator.probing.pod_reports import NoPodAccess, PodReports
from millstream_operator.probing.service_probe import ServiceAccess, ask
from millstream_operator.queue.work_queue import RequeueAfter, RetryLater
from millstream_operator.rendering.companions import CompanionDefaults
from millstream_operator.rendering.inspection_record import kept_inspections
from millstream_operator.rendering.names import LEADER, ROLE_LABEL
from millstream_operator.rendering.objects import objects
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import controller_revision
from millstream_operator.rollout.pinning import Chosen, Pinning
from millstream_operator.rollout.pruning import (
    also_running,
    digests_in_use,
    needed_maps,
    prunable,
    prunable_records,
    unmounted,
)
from millstream_operator.rollout.revisions import PinnedRevision, last_answered, last_good, pinned
from millstream_operator.rollout.rollout import RolloutInput, RolloutStep, SpareGPUs, next_step, spare_unknown
from millstream_operator.rollout.workload import rolled_out
from millstream_operator.status.events import decision_events, event_for, news
from millstream_operator.status.observation import Observation
from millstream_operator.status.status import status_of, status_of_invalid
from millstream_operator.status.warmup import warming_up

log = logging.getLogger(__name__)
Manifest = dict[str, Any]
RECHECK_BLOCKER_SECONDS = 30.0
SOON_SECONDS = 2.0
# The node's proxy learns of a new pod a moment after we do: that many unanswered questions are no news.
PATIENCE = 4


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the operator's own configuration gives to new plans and renderings."""

    plan: PlanDefaults = field(default_factory=PlanDefaults)
    pods: PodDefaults = field(default_factory=PodDefaults)
    companions: CompanionDefaults = field(default_factory=CompanionDefaults)


def _utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Reconciler:
    """Works on one key at a time; different keys may be worked on concurrently in one event loop."""

    def __init__(
        self,
        client: ClusterClient,
        index: Index,
        access: ServiceAccess,
        defaults: Defaults,
        served: ServedKinds,
        now: Callable[[], str] = _utc_now,
        reports: PodReports | None = None,
        spare: SpareGPUs = spare_unknown,
        facts: FactsSource | None = None,
        later: Later | None = None,
        news: Publisher | None = None,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._client, self._index, self._access, self._now = client, index, access, now
        self._spare = spare
        self.pinning = Pinning(facts or NoFacts(), defaults.plan, defaults.pods)
        self._at_once = EventWriter(client)
        self._news = news or self._at_once
        self._busy = busy
        self._beliefs = StatusRestorer(later)
        self._children = Children(client, index)
        self._claims = Claims(client, index)
        self._shared = SharedInspections(lambda key: later(key, 0.0) if later is not None else None)
        self._inspector = Inspector(
            self._children, index, defaults.plan, defaults.pods, lambda: self._now(), self._shared
        )
        self._reports = reports or PodReports(NoPodAccess(), lambda _key: None, time.monotonic)
        self._companions = CompanionsOf(self._children, served, defaults.companions)
        # By owner's uid: which revision and pods were asked, and what came of it.
        self._answers: dict[str, tuple[object, Answer]] = {}
        self._unanswered: dict[str, int] = {}  # failures in a row

    async def reconcile(self, key: OwnerKey) -> None:
        """Raises RetryLater when the work is not finished; the queue comes back with backoff."""
        manifest = self._index.get(LLM_DEPLOYMENT, key.namespace, key.name)
        if manifest is None or manifest["metadata"].get("deletionTimestamp"):
            self._reports.follow(key, ())
            self._shared.forget(key)
            return  # its children go by their owner references
        try:
            await self._reconcile(key, manifest)
        except ApiUnreachable as error:
            raise RetryLater(str(error)) from error
        except ApiError as error:
            if namespace_is_terminating(error):
                return
            raise RetryLater(f"{error.status} {error.message}", error.retry_after_seconds) from error

    async def _reconcile(self, key: OwnerKey, manifest: Manifest) -> None:
        try:
            owner = parse({k: v for k, v in manifest.items() if k != "status"})
        except ManifestError as error:
            await self._write_invalid(manifest, Diagnosis(Reason.INVALID_SPEC, str(error)))
            return
        records = self._children.own(owner, key, CONTROLLER_REVISION)
        believed = self._beliefs.of(owner, key, self._status(key), self._index.children(key, POD))
        try:
            chosen = await self._choose(owner, key, records, believed)
        except PlanRefused as refused:
            await self._keep(owner, key, manifest, records, refused)
            return
        pin = chosen.pin
        rollout = next_step(self._scene(owner, key, pin))
        if rollout.decisions:
            await self._tell(owner, key, rollout, chosen.outdated)
        wanted = self._wanted(owner, key, rollout)
        problem = await self._claims.problem(owner, wanted) or await self._children.apply_all(owner, wanted)
        if problem is None:
            await self._prune(owner, key, rollout, wanted)
        beside = await self._beside(owner, key, rollout.running, manifest)
        workload = self._children.get(owner, key, DEPLOYMENT)
        pods = self._index.children(key, POD)
        answer = await self._answer(owner, rollout.running, workload, pods, believed) if problem is None else None
        if answer is not None and answer.failure is None:
            await self._remember_answer(owner, rollout)
        previous = self._status(key)
        if problem is None and answer is None and not previous.get("conditions") and self._busy():
            raise RequeueAfter("its pods are made; its first status waits for the pods of others", SOON_SECONDS)
        seen = Observation(
            owner,
            pin.revision,
            workload,
            pods,
            answer,
            problem,
            previous,
            decisions=(*chosen.decisions, *beside.decisions),
            companions=beside.conditions,
            reports=self._reports.of(key),
            rollout=rollout,
            outdated=chosen.outdated,
        )
        self._reports.follow(key, warming_up(seen))
        await self._write_status(owner, previous, status_of(seen, self._now()))
        self._come_back(seen, beside)

    def _come_back(self, seen: Observation, beside: Companions) -> None:
        """Raise when, and for what, this one has to be looked at again though nothing may happen to it."""
        if seen.problem is not None:
            raise RequeueAfter(seen.problem.message, RECHECK_BLOCKER_SECONDS)
        if seen.answer is not None and seen.answer.failure is not None:
            raise RetryLater(seen.answer.failure.message)
        if self._unanswered.get(seen.owner.metadata.uid or ""):
            raise RetryLater("the model does not answer through its Service yet")
        if beside.problem:
            raise RequeueAfter(beside.problem, RECHECK_BLOCKER_SECONDS)

    async def _choose(
        self, owner: LLMDeployment, key: OwnerKey, records: Sequence[Manifest], believed: RestoredStatus | None
    ) -> Chosen:
        """The plan that holds, or a new one; what is pinned already needs no inspection of its model."""
        planned = pinned(owner, records) is not None
        inspected = self._inspector.known(owner, key) if planned else await self._inspector.ask(owner, key)
        return self.pinning.choose(owner, records, inspected, believed)

    async def _keep(
        self,
        owner: LLMDeployment,
        key: OwnerKey,
        manifest: Manifest,
        records: Sequence[Manifest],
        refused: PlanRefused,
    ) -> None:
        """There is no plan for the spec: the pods stay what they were, and are repaired; the status says why.

        What no plan decides (replicas, Service) follows the spec.
        """
        if refused.is_soon_over and not self._status(key).get("conditions") and self._busy():
            raise RequeueAfter(refused.problem.message, SOON_SECONDS)  # others have no pods yet
        beside = None
        if (kept := last_good(records)) is not None:
            rollout = next_step(self._scene(owner, key, kept))
            await self._children.apply_all(owner, self._wanted(owner, key, rollout))
            beside = await self._beside(owner, key, kept, manifest)
        await self._write_invalid(manifest, refused.problem, refused.plan, beside)
        if refused.recheck_seconds is not None:
            raise RequeueAfter(refused.problem.message, refused.recheck_seconds)

    # Children

    def _scene(self, owner: LLMDeployment, key: OwnerKey, pin: PinnedRevision) -> RolloutInput:
        return RolloutInput(
            owner,
            pin,
            self._children.own(owner, key, CONTROLLER_REVISION),
            self._children.get(owner, key, DEPLOYMENT),
            self._index.children(key, POD),
            self._status(key).get("decisions") or (),
            self._spare(owner, pin.revision),
        )

    async def _tell(
        self, owner: LLMDeployment, key: OwnerKey, rollout: RolloutStep, outdated: Diagnosis | None
    ) -> None:
        """Before the deed: whoever looks on when the first pod is drained finds out why."""
        scene, previous = self._scene(owner, key, rollout.pin), self._status(key)
        seen = Observation(
            owner,
            rollout.pin.revision,
            scene.workload,
            scene.pods,
            previous=previous,
            decisions=rollout.decisions,
            rollout=rollout,
            outdated=outdated,
        )
        await self._write_status(owner, previous, status_of(seen, self._now()))

    def _wanted(self, owner: LLMDeployment, key: OwnerKey, rollout: RolloutStep) -> list[Manifest]:
        """The record first: a pod never runs a revision that is not written down, and no failure is forgotten."""
        scene, running = self._scene(owner, key, rollout.pin), rollout.running.revision
        others = also_running(scene.records, digests_in_use(scene.workload, scene.pods), running)
        return [_record(owner, rollout.pin), *objects(owner, running, rollout.strategy, others)]

    async def _remember_answer(self, owner: LLMDeployment, rollout: RolloutStep) -> None:
        """What answered once is what a later revision goes back to when it fails."""
        if rollout.running is rollout.pin and not rollout.pin.marks.answered:
            pin = replace(rollout.pin, marks=replace(rollout.pin.marks, answered=True))
            await self._children.apply_all(owner, [_record(owner, pin)])

    async def _prune(
        self, owner: LLMDeployment, key: OwnerKey, rollout: RolloutStep, wanted: Sequence[Manifest]
    ) -> None:
        """Delete what is ours and no longer wanted."""
        scene = self._scene(owner, key, rollout.pin)
        good = last_answered(scene.records)
        keep = {one.revision.name for one in (rollout.pin, rollout.running, good) if one is not None}
        to_delete = prunable_records(scene.records, keep, digests_in_use(scene.workload, scene.pods))
        names = {record["metadata"]["name"] for record in to_delete}
        kept = [record for record in scene.records if record["metadata"]["name"] not in names]
        applied = {(one["kind"], one["metadata"]["name"]) for one in wanted}
        maps = needed_maps(owner.name, kept, scene.pods)
        maps |= kept_inspections(self._children.own(owner, key, CONFIG_MAP))
        for kind in OWNED:
            mine = self._children.own(owner, key, kind)
            to_delete = prunable(kind, mine, applied, names, maps)
            if kind is PERSISTENT_VOLUME_CLAIM:
                to_delete = unmounted(to_delete, scene.workload, scene.pods)
            await self._children.delete(owner, to_delete)

    async def _beside(self, owner: LLMDeployment, key: OwnerKey, pin: PinnedRevision, manifest: Manifest) -> Companions:
        previous = (manifest.get("status") or {}).get("conditions") or ()
        return await self._companions.apply_all(CompanionInput(owner, key, pin.revision.plan, previous))

    # The model

    async def _answer(
        self,
        owner: LLMDeployment,
        pin: PinnedRevision,
        workload: Manifest | None,
        pods: Sequence[Manifest],
        believed: RestoredStatus | None,
    ) -> Answer | None:
        """Ask once for each revision and set of pods; a failure is asked again at the next try."""
        uid = owner.metadata.uid or ""
        key = OwnerKey(owner.metadata.namespace or "", owner.name)
        if owner.spec.replicas == 0 or not rolled_out(owner, pin.revision, workload):
            self._forget_answer(uid)
            return None
        asked = (pin.revision.name, owner.spec.service, _serving(pods))
        known = self._answers.get(uid)
        if known is not None and known[0] == asked and known[1].failure is None:
            return known[1]
        if known is None and believed is not None and believed.answered == pin.revision.name:
            return Answer()
        answer = await ask(self._access, owner, pin.revision)
        self._answers[uid] = (asked, answer)
        if answer.failure is None:
            self._unanswered.pop(uid, None)
            return answer
        self._unanswered[uid] = self._unanswered.get(uid, 0) + 1
        if self._unanswered[uid] > PATIENCE:
            return answer
        # One question that is lost is no news of a model that served before: it stays Ready until it is sure.
        before = restored_status.believed(owner, self._status(key), pods)
        return Answer() if before is not None and before.answered == pin.revision.name else None

    # Status

    def _status(self, key: OwnerKey) -> Manifest:
        """As it was written last."""
        manifest = self._index.get(LLM_DEPLOYMENT, key.namespace, key.name) or {}
        return manifest.get("status") or {}

    async def _write_status(self, owner: LLMDeployment, before: Manifest, after: Manifest) -> None:
        """One patch, and only if something changed: our own write wakes us again."""
        after = {name: value for name, value in after.items() if value is not None}
        if {name: before.get(name) for name in after} == after and before.keys() <= after.keys():
            return
        metadata = {"name": owner.name, "namespace": owner.metadata.namespace}
        manifest = {"apiVersion": owner.api_version, "kind": owner.kind, "metadata": metadata, "status": after}
        answer = await self._client.apply(manifest, subresource="status")
        self._index.put(LLM_DEPLOYMENT, answer)
        for decided in decision_events(owner, before, after, self._now()):
            await self._at_once.publish(decided)  # before the deed
        if (event := event_for(owner, before, after, self._now())) is not None:
            await self._news.publish(event)

    async def _write_invalid(
        self,
        manifest: Manifest,
        problem: Diagnosis,
        plan: Manifest | None = None,
        beside: Companions | None = None,
    ) -> None:
        metadata, previous = manifest["metadata"], manifest.get("status") or {}
        told = beside.conditions if beside is not None else None
        live = self._index.get(DEPLOYMENT, metadata["namespace"], metadata["name"])
        ours = live if live is not None and controller_uid(live) == metadata["uid"] else None
        after = status_of_invalid(previous, metadata.get("generation", 0), problem, self._now(), plan, ours, told)
        if after == previous:
            return
        body = {
            "apiVersion": manifest["apiVersion"],
            "kind": manifest["kind"],
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "status": after,
        }
        self._index.put(LLM_DEPLOYMENT, await self._client.apply(body, subresource="status"))
        if (event := news(metadata, previous, after, self._now())) is not None:
            await self._news.publish(event)

    def forget(self, uid: str) -> None:
        """Nothing is known any more about an LLMDeployment that is gone."""
        self._forget_answer(uid)
        self._claims.forget(uid)
        self._beliefs.forget(uid)
        self.pinning.forget(uid)

    def _forget_answer(self, uid: str) -> None:
        self._answers.pop(uid, None)
        self._unanswered.pop(uid, None)


def _record(owner: LLMDeployment, pin: PinnedRevision) -> Manifest:
    return controller_revision(owner, pin.revision, pin.number, pin.marks)


def _serving(pods: Sequence[Manifest]) -> frozenset[str]:
    """The leader pods that are ready: other pods, another question."""
    return frozenset(
        pod["metadata"]["uid"]
        for pod in pods
        if pod["metadata"].get("labels", {}).get(ROLE_LABEL) == LEADER
        and find(pod.get("status", {}).get("conditions") or [], conditions.READY).get("status") == "True"
    )
