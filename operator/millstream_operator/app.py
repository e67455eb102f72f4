"""The operator's wiring: kopf's watches fill the index and enqueue keys; the queue's workers reconcile them.

    kopf watch ─▶ index ─▶ queue.add(key) ─▶ worker ─▶ Reconciler.reconcile(key) ─▶ fence ─▶ API server
    resync (a whole listing, periodically)  ─▲                                        ▲
                                                                    Elector (Lease) ─┘

Only `on.event` handlers are used: they keep no state in annotations, add no finalizers and are never retried by kopf.
A broken watch can miss a deletion, so a slow, jittered resync compares the index with whole listings.

Every replica watches, so its index is warm; only the leader's queue runs. A new leader lists everything again and
enqueues all keys; a replica that stops leading drops its queue and keeps watching.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from dataclasses import dataclass, field
from typing import Any

import kopf

from millstream_operator import gc_freeze
from millstream_operator.children.deleted_owners import left_running
from millstream_operator.facts.api_servers import ApiServers
from millstream_operator.facts.calibration_record import config_map_name
from millstream_operator.facts.calibration_store import CalibrationStore
from millstream_operator.facts.catalog_watch import CatalogWatch
from millstream_operator.facts.cluster_facts import ClusterFacts
from millstream_operator.facts.gpu_watch import GpuWatch
from millstream_operator.facts.probe_key_secret import ProbeKeySecret
from millstream_operator.health import HealthServer
from millstream_operator.kopf_settings import kopf_settings, login
from millstream_operator.kube.client import (
    REQUEST_TIMEOUT_SECONDS,
    ApiError,
    ApiUnreachable,
    ClusterClient,
)
from millstream_operator.kube.event_queue import EventQueue
from millstream_operator.kube.fence import Fence, NotLeader, steady_seconds
from millstream_operator.kube.index import Index, OwnerKey, affected_owners, owner_key
from millstream_operator.kube.kinds import DEPLOYMENT, LLM_DEPLOYMENT, WATCHED, Kind
from millstream_operator.kube.optional_kinds import OptionalKinds
from millstream_operator.kube.pod_access import DirectPods, PodAccess, ProxyPods
from millstream_operator.kube.watch_freshness import WatchFreshness
from millstream_operator.kube.watch_verification import WatchVerification
from millstream_operator.leadership.election import Election, Timing
from millstream_operator.leadership.elector import Elector, LeaseObject, new_identity
from millstream_operator.leadership.ownership import Release, without_others
from millstream_operator.listings import Listings
from millstream_operator.metrics import OperatorMetrics, StateCollector
from millstream_operator.probing.background_reports import BackgroundReports
from millstream_operator.probing.derived_keys import DerivedKeys
from millstream_operator.probing.service_probe import DirectAccess, ProxyAccess, ServiceAccess
from millstream_operator.queue.priority import can_wait, was_applied
from millstream_operator.queue.work_queue import WorkQueue
from millstream_operator.reconciling.reconciler import Reconciler
from millstream_operator.rendering.names import MANAGER
from millstream_operator.rendering.surroundings import Surroundings
from millstream_operator.settings import Settings
from millstream_operator.workloads.deployments import DEPLOYMENTS

log = logging.getLogger(__name__)

# Each has at most one request in flight.
WORKERS = 16
# A worker waits at most for a handful of requests with timeouts; far beyond that it hangs, and a restart helps.
HUNG_WORKER_SECONDS = 600.0
# After SIGTERM: for writes in flight, so that the Lease can be released and need not expire.
SHUTDOWN_WRITES_SECONDS = 8.0


class WritesStillInFlight(Exception):
    """A write is in flight while another replica may already lead: only the end of the process stops it."""


@dataclass
class Operator:
    """The parts of a running operator."""

    settings: Settings
    kopf_settings: kopf.OperatorSettings = field(default_factory=kopf_settings)
    timing: Timing = field(default_factory=Timing)
    identity: str = field(default_factory=new_identity)
    fence: Fence = field(default_factory=Fence)
    metrics: OperatorMetrics = field(default_factory=OperatorMetrics)

    def __post_init__(self) -> None:
        self.release = Release(self.settings.operator_namespace, self.settings.lease_name)
        self.freshness = WatchFreshness(WATCHED, steady_seconds())
        self.catalog = CatalogWatch(self.settings.gpu_catalog)
        self.index = Index(
            lambda kind, manifest: self.watches.expect(kind, manifest),
            lambda kind, manifest: self.facts.changed(kind, manifest),
        )
        self.facts = ClusterFacts(
            self.index,
            self.settings.defaults.pods,
            self.catalog.catalog,
            node_pools=self.settings.node_pools,
            on_change=self._other_gpus,
        )
        self.gpus = GpuWatch(self.facts, enabled=self.settings.inventory)
        self.queue: WorkQueue[OwnerKey] = WorkQueue(observe=self.metrics.reconciled)
        self.client = self._new_client(self.fence)
        self.watches = WatchVerification(self.client, self.freshness, lambda: steady_seconds())
        access: ServiceAccess = DirectAccess()
        pods: PodAccess = DirectPods()
        if self.settings.service_access_by_proxy:
            access, pods = ProxyAccess(self.client), ProxyPods(self.client)
        self.optional = OptionalKinds(self.index, self._namespaces())
        self.listings = self._new_listings()
        self.events = EventQueue(self.client, self.queue.has_urgent)
        self.probe_keys = ProbeKeySecret(self.client, self.settings.operator_namespace, self.settings.probe_key_secret)
        self.api_servers = ApiServers(self.client, os.environ)
        self.reports = BackgroundReports(pods, self._enqueue, steady_seconds)
        self.calibration = self._new_calibration()
        self.reconciler = self._new_reconciler(access)
        self.elector: Elector | None = None
        self._listed_in_term: int | None = None  # everything was listed within this term: no other replica wrote since
        self.metrics.registry.register(self._view())

    def _new_listings(self) -> Listings:
        known = self.client, self.index, self.freshness, self.gpus, self.optional
        seconds = self.settings.discovery_seconds
        return Listings(*known, self._namespaces(), self._enqueue, self._enqueue_all, seconds)

    def _new_calibration(self) -> CalibrationStore:
        return CalibrationStore(
            self.client,
            self.settings.operator_namespace,
            config_map_name(self.settings.lease_name),
            use=self.facts.use_calibration,
            catalog=lambda: self.facts.catalog,
            clock=steady_seconds,
        )

    def _new_reconciler(self, access: ServiceAccess) -> Reconciler:
        return Reconciler(
            self.client,
            self.index,
            access,
            self.settings.defaults,
            self.optional,
            reports=self.reports.pods,
            drafting=self.reports.drafting,
            step_reports=self.reports.steps,
            facts=self.facts,
            room=self.facts.room,
            later=self._enqueue_after,
            events=self.events,
            busy=self.queue.has_urgent,
            keys=DerivedKeys(lambda: self.probe_keys.ring),
            surroundings=self._surroundings,
            calibration=self.calibration,
            max_adoptions=self.settings.max_adoptions,
            recheck_seconds=self.settings.recheck_seconds,
            release=self.release,
        )

    def _new_client(
        self, fence: Fence | None = None, timeout_seconds: float = REQUEST_TIMEOUT_SECONDS
    ) -> ClusterClient:
        """Return a client whose User-Agent names this replica in the audit log."""
        agent = f"{MANAGER} ({self.identity})"
        return ClusterClient(lambda: login(self.kopf_settings), fence, self.metrics, agent, timeout_seconds)

    def _surroundings(self) -> Surroundings:
        settings = self.settings
        network = settings.defaults.network
        return Surroundings(self.probe_keys.ring, network, settings.operator_namespace, self.api_servers.known)

    async def run(self) -> None:
        """Run until cancelled, or until kopf ends by a signal."""
        health = HealthServer(self.problems, self.not_ready, self.metrics.exposition)
        server = await health.start(self.settings.health_port)
        try:
            if self.settings.leader_election:
                await self._run_elected()
            else:
                await self._first_listing()
                await self._refresh_surroundings()
                await self.calibration.load()
                self._enqueue_all()
                await self._run_parts([])
        finally:
            await self.client.close()
            await server.cleanup()

    async def _run_elected(self) -> None:
        """Acquire a free Lease before the first listing, so that everything need not be listed twice.

        A held Lease is not competed for before the index is complete: standbys with a warm index go first.
        """
        lease_client = self._new_client(timeout_seconds=self.timing.request_timeout_seconds)
        lease = LeaseObject(lease_client, self.settings.operator_namespace, self.settings.lease_name)
        self.elector = elector = Elector(lease, Election(self.identity, self.timing), self.fence)
        self.queue.stand_by()
        competing = []
        try:
            if await elector.acquire_if_free():
                competing = [_renewing(elector)]
                self._listed_in_term = elector.term
            await self._first_listing()
            await self._run_parts(competing or [_renewing(elector)])
        finally:
            await _cancel(*competing)
            await elector.release()
            await lease_client.close()

    async def _first_listing(self) -> None:
        await self.listings.first()
        self.kopf_settings.watching.chunk_size = self.listings.page_objects
        self.facts.advance()
        gc_freeze.freeze_gc()

    async def _run_parts(self, competing: list[asyncio.Task[None]]) -> None:
        """Run everything until one part ends. The parts start before kopf, which cancels tasks that start later."""
        elector = self.elector
        background = [
            asyncio.create_task(self.queue.run(self.reconciler.reconcile, WORKERS), name="workers"),
            asyncio.create_task(self.events.run(), name="Events"),
            asyncio.create_task(self.listings.resync_forever(), name="resync"),
            asyncio.create_task(self.reports.run(), name="reports of pods"),
            asyncio.create_task(self.calibration.load_forever(), name="calibration"),
            asyncio.create_task(self.watches.verify_forever(), name="watch freshness"),
            asyncio.create_task(self._refresh_facts_forever(), name="facts"),
            *([asyncio.create_task(self.gpus.run(self.client), name="GPUs")] if self.settings.inventory else []),
            asyncio.create_task(self.listings.discover_forever(), name="optional kinds"),
            *([asyncio.create_task(self._lead_forever(elector), name="leading")] if elector is not None else []),
        ]
        parts = [*competing, *background, asyncio.create_task(self._watch(), name="watching")]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(*competing)  # so that the fence is not opened again
            self.fence.close()
            self.queue.stand_by()
            await self.fence.wait_quiet(SHUTDOWN_WRITES_SECONDS)
            await _cancel(*parts)
        for task in done:
            if not task.cancelled():
                task.result()  # raises the error that ended the operator, if any

    async def _watch(self) -> None:
        await kopf.operator(
            registry=self.registry(),
            settings=self.kopf_settings,
            standalone=True,
            clusterwide=not self.settings.watch_namespaces,
            namespaces=self.settings.watch_namespaces,
        )

    def registry(self) -> kopf.OperatorRegistry:
        """Handlers for every watched kind, and the login."""
        registry = kopf.OperatorRegistry()
        for kind in WATCHED:
            kopf.on.event(kind.group, kind.version, kind.plural, id=kind.plural, registry=registry)(self._handler(kind))
        kopf.on.login(registry=registry)(lambda **_: login(self.kopf_settings))
        return registry

    def _handler(self, kind: Kind) -> Any:
        async def on_event(event: Any, **_: Any) -> None:
            manifest = {"apiVersion": kind.api_version, "kind": kind.kind, **event["object"]}
            gone, metadata = event["type"] == "DELETED", manifest["metadata"]
            before = self.index.get(kind, metadata["namespace"], metadata["name"])
            changed = self.index.remove(kind, manifest) if gone else self.index.put(kind, manifest)
            version = int(metadata["resourceVersion"])
            self.freshness.delivered(kind, metadata["namespace"], metadata["name"], version, steady_seconds())
            if gone and kind is LLM_DEPLOYMENT:
                self.reconciler.forget(metadata["uid"])
            if changed:
                for key in affected_owners(kind, manifest):
                    patient = not gone and can_wait(kind, before, manifest) and self._was_applied(key)
                    self.queue.add(key, can_wait=patient)

        return on_event

    def _enqueue(self, key: OwnerKey) -> None:
        """Enqueue a key, behind those whose spec was not applied yet if its own was."""
        self.queue.add(key, can_wait=self._was_applied(key))

    def _enqueue_after(self, key: OwnerKey, seconds: float) -> None:
        """Enqueue a key after some seconds, behind those whose spec was not applied yet if its own was."""
        self.queue.add(key, seconds, can_wait=self._was_applied(key))

    def _was_applied(self, key: OwnerKey) -> bool:
        owner, workload = (self.index.get(kind, key.namespace, key.name) for kind in (LLM_DEPLOYMENT, DEPLOYMENT))
        return was_applied(owner, workload)

    def _enqueue_all(self) -> None:
        for manifest in self.index.all(LLM_DEPLOYMENT):
            self._enqueue(owner_key(LLM_DEPLOYMENT, manifest))
        self._enqueue_left_running()

    def _enqueue_left_running(self) -> None:
        """Enqueue LLMDeployments that were deleted while no replica led or watched, and that still serve."""
        for key in left_running(self.index, DEPLOYMENTS):
            self.queue.add(key)

    def _namespaces(self) -> tuple[str | None, ...]:
        return self.settings.watch_namespaces or (None,)

    # Leadership

    async def _lead_forever(self, elector: Elector) -> None:
        while True:
            term = await elector.wait_until_leading()
            log.info("%s leads", self.identity)
            await self._take_over(elector, term)
            await elector.wait_until_lost(term)
            log.warning("%s no longer leads and stands by", self.identity)
            self.queue.stand_by()
            self.reports.clear()
            # Every write has a time limit that ends before another replica can lead, so this wait is short.
            if not await self.fence.wait_idle(self.timing.write_timeout_seconds + self.timing.margin_seconds):
                raise WritesStillInFlight(f"{self.fence.in_flight} writes are still in flight after their time limit")

    async def _take_over(self, elector: Elector, term: int) -> None:
        """List everything that the previous leader wrote, then enqueue all keys."""
        while elector.leading and elector.term == term:
            try:
                if term != self._listed_in_term:
                    await self.listings.resync()
                await self._refresh_surroundings()
            except (ApiError, ApiUnreachable, NotLeader) as error:
                log.warning("taking over: %s", error)
                await asyncio.sleep(self.timing.retry_after_failure_seconds)
            else:
                await self.calibration.load()
                self.queue.resume()
                self._enqueue_all()
                return

    # Facts

    async def _refresh_facts_forever(self) -> None:
        while True:
            await asyncio.sleep(self.settings.recheck_seconds * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
            self.refresh_facts()
            if self.elector is not None and not self.elector.leading:
                continue
            try:
                if await self._refresh_surroundings():
                    self._enqueue_all()
            except (ApiError, ApiUnreachable, NotLeader) as error:
                log.warning("keys of the probe and addresses of the API server stay as they were: %s", error)

    async def _refresh_surroundings(self) -> bool:
        """Read the probe's keys and the API server's addresses again; the leader alone needs them."""
        changed = [await self.probe_keys.refresh(), await self.api_servers.refresh()]
        return any(changed)

    def refresh_facts(self) -> None:
        """Enqueue deployments whose plans may be outdated (all, or those that wait for GPUs), and deleted ones.

        Spread over the time until the next refresh, so that a thousand of them delay nothing else.
        """
        if self.catalog.refresh():
            self.facts.use_catalog(self.catalog.catalog)
        if self.facts.advance():
            for manifest in self.index.all(LLM_DEPLOYMENT):
                after_seconds = random.uniform(0.0, self.settings.recheck_seconds)  # noqa: S311 - spread
                self.queue.add(owner_key(LLM_DEPLOYMENT, manifest), after_seconds, can_wait=True)
        for key in [*self.reconciler.pinning.waiting.values(), *self.reconciler.rolling.values()]:
            self.queue.add(key, can_wait=True)
        self._enqueue_left_running()

    def _other_gpus(self) -> None:
        """A node or a pod with GPUs has changed: a rollout may go on, or must not drain its next pod."""
        for key in list(self.reconciler.rolling.values()):
            self.queue.add(key)

    # Health

    def problems(self) -> list[str]:
        """What only a restart mends. An API server that is away is none of it."""
        seconds = self.queue.longest_running_seconds()
        hung = [f"a worker has been busy for {seconds:.0f} seconds"] if seconds > HUNG_WORKER_SECONDS else []
        return hung + self.freshness.dead(steady_seconds())

    def not_ready(self) -> list[str]:
        """A standby is ready, too: it could take over."""
        return [] if self.listings.complete else ["the first listing is not done"]

    def _view(self) -> StateCollector:
        return StateCollector(
            queue_depth=lambda: self.queue.count(),
            queue_age_seconds=lambda: self.queue.oldest_due_seconds(),
            watch_age_seconds=lambda: {
                kind.kind: self.freshness.age_seconds(kind, steady_seconds()) for kind in WATCHED
            },
            leading=lambda: self.elector.leading if self.elector is not None else not self.settings.leader_election,
            llmdeployments=lambda: without_others(self.index.all(LLM_DEPLOYMENT), self.release),
            events_waiting=lambda: self.events.waiting,
            inventory_known=lambda: self.facts.problem is None,
            catalog_valid=lambda: self.catalog.problem is None,
            managed_by_another=lambda: self.reconciler.left_to_others,
        )


def _renewing(elector: Elector) -> asyncio.Task[None]:
    return asyncio.create_task(elector.run(), name="elector")


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
