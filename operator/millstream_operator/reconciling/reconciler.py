"""`reconcile(key)`: make the cluster match one LLMDeployment, and write its status.

    stop -> claim -> adopt orphans -> read -> plan -> compare -> decide -> announce -> apply -> prune -> companions
         -> probe -> report -> calibrate -> requeue

Each stage takes the turn's `ReconcileContext` and has a file of its own here; `stop` is about deleted LLMDeployments of
the same name and takes the key alone, and `claim` decides whether this release manages the object at all. Level-
triggered: a turn looks at everything and remembers nothing that it could not find out again, so it may be killed before
or after any of its writes. Reads come from the index; a live GET comes before anything destructive.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from millstream_operator.api.load import ManifestError
from millstream_operator.api.status import RolloutPhase
from millstream_operator.api.stored import parse_stored
from millstream_operator.children.children import Children, namespace_is_terminating
from millstream_operator.children.companions import CompanionApplier, ServedKinds
from millstream_operator.children.foreign_autoscalers import ForeignAutoscalers
from millstream_operator.children.foreign_services import ForeignServices
from millstream_operator.children.volume_checks import VolumeChecks
from millstream_operator.diagnosis.diagnosis import Diagnosis
from millstream_operator.diagnosis.plan_refused import RECHECK_SECONDS, PlanRefused
from millstream_operator.diagnosis.reasons import Reason
from millstream_operator.facts.calibration_store import CalibrationStore
from millstream_operator.facts.cluster_facts import FactsSource
from millstream_operator.facts.inspector import Inspector
from millstream_operator.facts.restored_status import EnqueueAfter, StatusRestorer
from millstream_operator.facts.shared_inspections import SharedInspections
from millstream_operator.kube.client import ApiError, ApiUnreachable, ClusterClient
from millstream_operator.kube.event_queue import EventPublisher
from millstream_operator.kube.fence import steady_seconds
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import LLM_DEPLOYMENT
from millstream_operator.leadership.ownership import Release, manager_of
from millstream_operator.preparation.draft_tuner import DraftTuner
from millstream_operator.preparation.preparer import Preparer
from millstream_operator.probing.drafting_reports import DraftingReports
from millstream_operator.probing.pod_measurement import PodMeasurer
from millstream_operator.probing.pod_reports import PodReports
from millstream_operator.probing.pod_traffic import TrafficReader
from millstream_operator.probing.probe_key import NoKeys, ProbeKeys
from millstream_operator.probing.service_probe import ServiceAccess
from millstream_operator.probing.step_reports import StepReports
from millstream_operator.queue.work_queue import RequeueAfter, RetryLater
from millstream_operator.reconciling.adopt_orphans import AdoptOrphansStage
from millstream_operator.reconciling.apply import ApplyStage
from millstream_operator.reconciling.budget import hold_to_budget
from millstream_operator.reconciling.calibrate import CalibrateStage
from millstream_operator.reconciling.claim import ClaimStage
from millstream_operator.reconciling.compare import CompareStage
from millstream_operator.reconciling.context import ContextReader, ReconcileContext
from millstream_operator.reconciling.decide import RoomFor, decide
from millstream_operator.reconciling.defaults import Defaults
from millstream_operator.reconciling.plan import PlanStage
from millstream_operator.reconciling.probe import ProbeStage
from millstream_operator.reconciling.prune import prune
from millstream_operator.reconciling.report import ReportStage
from millstream_operator.reconciling.requeue import requeue
from millstream_operator.reconciling.stop import StopStage
from millstream_operator.rendering.surroundings import Surroundings
from millstream_operator.rollout.adoption_limit import MAX_CONCURRENT_ADOPTIONS, AdoptionLimit
from millstream_operator.rollout.pinning import Chosen, Pinning
from millstream_operator.rollout.retry import remaining_seconds
from millstream_operator.rollout.revisions import last_good
from millstream_operator.status.download_time import remaining_download_seconds
from millstream_operator.status.warmup import loading
from millstream_operator.workloads.deployments import DEPLOYMENTS
from millstream_operator.workloads.workload import Workload

Manifest = dict[str, Any]
SOON_SECONDS = 2.0


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
        *,
        reports: PodReports,
        facts: FactsSource,
        room: RoomFor,
        now: Callable[[], str] = _utc_now,
        later: EnqueueAfter | None = None,
        events: EventPublisher | None = None,
        busy: Callable[[], bool] = lambda: False,
        max_adoptions: int = MAX_CONCURRENT_ADOPTIONS,
        keys: ProbeKeys | None = None,
        clock: Callable[[], float] = steady_seconds,
        surroundings: Callable[[], Surroundings] = Surroundings,
        calibration: CalibrationStore | None = None,
        workloads: Workload = DEPLOYMENTS,
        drafting: DraftingReports | None = None,
        step_reports: StepReports | None = None,
        recheck_seconds: float = RECHECK_SECONDS,
        release: Release | None = None,
    ) -> None:
        """`release`: this one, by its Lease; None: what it finds is its own, and no status records it."""
        self._release = release
        self._claim = ClaimStage(client, index, release, now, clock, events) if release is not None else None
        self._drafting, self._step_reports = drafting, step_reports
        self._index, self._reports, self._room, self._busy = index, reports, room, busy
        self._now, self._later, self._recheck_seconds, self._facts = now, later, recheck_seconds, facts
        self.rolling: dict[str, OwnerKey] = {}  # by uid: rollouts that other GPUs may help or stop
        self.pinning = Pinning(facts, defaults.plan, defaults.pods, AdoptionLimit(index, max_adoptions))
        self._children = Children(client, index)
        self._volume_checks = VolumeChecks(client, index)
        self._stop = StopStage(client, index, workloads)
        self._adopt_orphans = AdoptOrphansStage(client, index)
        self._restorer = StatusRestorer(later)
        self._shared = SharedInspections(lambda key: later(key, 0.0) if later is not None else None)
        inspector = Inspector(
            self._children, index, defaults.plan, defaults.pods, now, self._shared, surroundings, recheck_seconds
        )
        companions = CompanionApplier(self._children, served, defaults.companions)
        self._reader = ContextReader(index, self._children, self._restorer, workloads)
        jobs = self._children, index, defaults.pods, now
        preparer = Preparer(*jobs, self._volume_checks, surroundings, step_reports, recheck_seconds)
        tuner = DraftTuner(*jobs, surroundings, recheck_seconds)
        self._plan = PlanStage(self.pinning, inspector, preparer, tuner)
        self._apply = ApplyStage(
            self._children,
            self._volume_checks,
            companions,
            surroundings,
            ForeignAutoscalers(client),
            ForeignServices(client, clock),
        )
        measurer = PodMeasurer(reports.access, client)
        self._probe = ProbeStage(access, self._children, keys or NoKeys(), measurer, later, clock)
        self._compare = CompareStage(TrafficReader(reports.access, client), clock)
        self._report = ReportStage(client, index, reports, now, events, workloads, drafting, release)
        self._calibrate = CalibrateStage(calibration)

    async def reconcile(self, key: OwnerKey) -> None:
        """Raises RetryLater when the work is not finished; the queue comes back with backoff."""
        if self._existing(key) is None:
            self._unfollow(key)
        try:
            await self._stop.run(key)
            await self._report_deletion(key)
            if (manifest := await self._managed(key)) is not None:
                await self._reconcile(key, manifest)
        except ApiUnreachable as error:
            raise RetryLater(str(error)) from error
        except ApiError as error:
            if namespace_is_terminating(error):
                return
            raise RetryLater(f"{error.status} {error.message}", error.retry_after_seconds) from error

    def _existing(self, key: OwnerKey) -> Manifest | None:
        """Return the LLMDeployment, unless it is being deleted: the garbage collector deletes its children."""
        manifest = self._index.get(LLM_DEPLOYMENT, key.namespace, key.name)
        return None if manifest is None or manifest["metadata"].get("deletionTimestamp") else manifest

    async def _managed(self, key: OwnerKey) -> Manifest | None:
        """Return the LLMDeployment, where this release manages it. Otherwise the key comes back to look again."""
        manifest = self._existing(key)
        if manifest is None or self._claim is None:
            return manifest
        if (claimed := await self._claim.run(manifest)) is not None:
            return claimed
        self._unfollow(key)
        self.pinning.leave(key)
        self.rolling.pop(manifest["metadata"]["uid"], None)
        if self._later is not None:
            self._later(key, self._recheck_seconds)
        return None

    async def _report_deletion(self, key: OwnerKey) -> None:
        """Say of an object that is being deleted that it is not Ready any more, where this release manages it."""
        manifest = self._index.get(LLM_DEPLOYMENT, key.namespace, key.name)
        if manifest is None or not manifest["metadata"].get("deletionTimestamp"):
            return
        if manager_of(manifest.get("status") or {}) in (None, self._release):
            await self._report.run_terminating(manifest)

    @property
    def left_to_others(self) -> int:
        """How many LLMDeployments another release manages."""
        return len(self._claim.left_to_others) if self._claim is not None else 0

    def _unfollow(self, key: OwnerKey) -> None:
        """Ask no pod of a deleted LLMDeployment any more."""
        self._reports.follow(key, ())
        if self._drafting is not None:
            self._drafting.follow(key, "", ())
        if self._step_reports is not None:
            self._step_reports.follow(key, None)
        self._shared.forget(key)

    async def _reconcile(self, key: OwnerKey, manifest: Manifest) -> None:
        try:
            owner, unknown = parse_stored({k: v for k, v in manifest.items() if k != "status"})
        except ManifestError as error:
            self.pinning.leave(key)
            await self._report.run_invalid(manifest, Diagnosis(Reason.INVALID_SPEC, str(error)))
            return
        await self._adopt_orphans.run(owner, key)
        context = replace(self._reader.read(owner, key), unknown_fields=unknown)
        try:
            context = await self._plan.run(context)
        except PlanRefused as refused:
            self.pinning.leave(key)
            await self._keep_last_good(context, manifest, refused)
            return
        await self._run(context)

    async def _run(self, context: ReconcileContext) -> None:
        """The stages after a plan was found. What a stage wrote is read again from the index."""
        read_again = self._reader.refresh
        context = await self._compare.run(hold_to_budget(read_again(context)))
        context = self._decide(read_again(context))
        await self._report.announce(context)
        context = await self._apply.run(read_again(context))
        await prune(read_again(context), self._children)
        context = await self._apply.apply_companions(read_again(context))
        context = await self._probe.run(read_again(context))
        self._let_others_pass(context)
        context = self._calibrate.compare(context)
        await self._report.run(read_again(context))
        await self._calibrate.run(read_again(context))
        failed = self._probe.has_failed(context.uid)
        requeue(context, probe_failed=failed, recheck_seconds=self._recheck_seconds)

    def _decide(self, context: ReconcileContext, *, announces: bool = True) -> ReconcileContext:
        """Decide, and note when to decide again though no object of this one changes."""
        now, revision = self._now(), context.plan.pin.revision
        downloading = remaining_download_seconds(context.owner, context.pods, revision.plan, revision.digest, now)
        advancing = self._reports.advancing(context.key, loading(context.pods)) | downloading.keys()
        context = decide(context, self._room, now, announces=announces, advancing=advancing)
        step, failure = context.rollout, context.rollout.pin.marks.failure
        if step.phase in (RolloutPhase.COMPLETE, RolloutPhase.STOPPED) or not context.pods:
            self.rolling.pop(context.uid, None)
        else:
            self.rolling[context.uid] = context.key
        retry_seconds = remaining_seconds(failure, now) if failure is not None else None
        for seconds in (*downloading.values(), retry_seconds, step.wait_seconds):
            if seconds is not None and self._later is not None:
                self._later(context.key, max(seconds, 0.0) + 1.0)
        return replace(context, advancing=advancing, lacks_gpus=self._facts.lacks_gpus)

    async def _keep_last_good(self, context: ReconcileContext, manifest: Manifest, refused: PlanRefused) -> None:
        """Repair what runs, and report why the spec has no plan.

        What no plan decides (replicas, Service) follows the spec.
        """
        context = self._reader.refresh(context)
        if refused.is_soon_over and not context.previous.get("conditions") and self._busy():
            raise RequeueAfter(refused.problem.message, SOON_SECONDS)  # others have no pods yet
        if (kept := last_good(context.records, context.live_digest)) is not None:
            kept_on = hold_to_budget(replace(context, chosen=Chosen(kept)))
            context = self._decide(kept_on, announces=False)
            context = await self._apply.repair(context)
            context = await self._apply.apply_companions(self._reader.refresh(context))
        await self._report.run_invalid(manifest, refused.problem, refused.plan, context, refused)
        if refused.recheck_seconds is not None:
            raise RequeueAfter(refused.problem.message, refused.recheck_seconds)

    def _let_others_pass(self, context: ReconcileContext) -> None:
        """Put the first status of new pods off while other LLMDeployments have no pods at all."""
        is_news = context.problem is not None or context.answer is not None or context.previous.get("conditions")
        if not is_news and self._busy():
            raise RequeueAfter("its pods are made; its first status waits for the pods of others", SOON_SECONDS)

    def forget(self, uid: str) -> None:
        """Drop what is known about an LLMDeployment that is gone."""
        if self._claim is not None:
            self._claim.forget(uid)
        self._probe.forget(uid)
        self._compare.forget(uid)
        self._report.forget(uid)
        self._volume_checks.forget(uid)
        self._calibrate.forget(uid)
        self._restorer.forget(uid)
        self.pinning.forget(uid)
        self.rolling.pop(uid, None)
