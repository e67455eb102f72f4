"""kopf wiring, and nothing else: watches fill the index and enqueue a key; the queue's workers reconcile it.

    kopf watch ─▶ index ─▶ queue.add(key) ─▶ worker ─▶ Reconciler.reconcile(key)
    resync (a whole listing, now and then) ─▲

Only `on.event` handlers are used: they keep no state in annotations, add no finalizers and are never retried by kopf.
A watch that broke can miss a deletion, so a slow, jittered resync compares the index with whole listings.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import kopf

from millstream_operator.reconciling.cluster_client import ApiError, ApiUnreachable, ClusterClient
from millstream_operator.reconciling.index import Index, OwnerKey, interested
from millstream_operator.reconciling.kinds import LLM_DEPLOYMENT, WATCHED, Kind, label_selector
from millstream_operator.reconciling.reconciler import Reconciler
from millstream_operator.reconciling.service_probe import DirectAccess, ProxyAccess, ServiceAccess
from millstream_operator.reconciling.work_queue import WorkQueue
from millstream_operator.settings import Settings

log = logging.getLogger(__name__)

WORKERS = 8
RESYNC_SECONDS = 300.0
RESYNC_RETRY_SECONDS = 5.0
# A worker waits at most for a handful of requests with timeouts; far beyond that it hangs, and a restart helps.
HUNG_WORKER_SECONDS = 600.0
WATCH_TIMEOUT_SECONDS = 290
CONNECT_TIMEOUT_SECONDS = 10


class EndlessBackoffs:
    """Seconds between kopf's own retries: growing, then steady, for ever.

    kopf's default list ends after a minute without an API server, and the process with it; `iter()` starts anew for
    each request.
    """

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1.0, 2.0, 4.0)
        while True:
            yield 5.0 * random.uniform(0.8, 1.2)  # noqa: S311 - jitter


def kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # no watching of CRDs and namespaces, so no rights on them
    settings.networking.error_backoffs = EndlessBackoffs()
    settings.networking.request_timeout = 60.0
    settings.networking.connect_timeout = CONNECT_TIMEOUT_SECONDS
    settings.watching.server_timeout = WATCH_TIMEOUT_SECONDS
    settings.watching.client_timeout = WATCH_TIMEOUT_SECONDS + 10
    settings.watching.connect_timeout = CONNECT_TIMEOUT_SECONDS
    for kind in WATCHED:
        if (selector := label_selector(kind)) is not None:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = selector
    return settings


def login(settings: kopf.OperatorSettings) -> kopf.ConnectionInfo:
    """The pod's service account, else the user's kubeconfig."""
    found = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(settings=settings)
    if found is None:
        raise kopf.LoginError("no service account and no kubeconfig: run in a pod, or set KUBECONFIG")
    return found


@dataclass
class Operator:
    """The parts of a running operator."""

    settings: Settings
    kopf_settings: kopf.OperatorSettings = field(default_factory=kopf_settings)
    index: Index = field(default_factory=Index)
    queue: WorkQueue[OwnerKey] = field(default_factory=WorkQueue)

    def __post_init__(self) -> None:
        self.client = ClusterClient(lambda: login(self.kopf_settings))
        access: ServiceAccess = DirectAccess()
        if self.settings.service_access_by_proxy:
            access = ProxyAccess(self.client)
        self.reconciler = Reconciler(self.client, self.index, access, self.settings.defaults)

    async def run(self) -> None:
        """Until cancelled, or until kopf ends by a signal."""
        try:
            await self._first_listing()
            background = [
                asyncio.create_task(self.queue.run(self.reconciler.reconcile, WORKERS), name="workers"),
                asyncio.create_task(self._resync_for_ever(), name="resync"),
            ]
            watching = asyncio.create_task(self._watch(), name="watching")
            done, _ = await asyncio.wait([*background, watching], return_when=asyncio.FIRST_COMPLETED)
            for task in (*background, watching):
                task.cancel()
            await asyncio.gather(*background, watching, return_exceptions=True)
            for task in done:
                if not task.cancelled():
                    task.result()  # what ended the operator, if it was an error
        finally:
            await self.client.close()

    async def _watch(self) -> None:
        await kopf.operator(
            registry=self.registry(),
            settings=self.kopf_settings,
            standalone=True,
            clusterwide=not self.settings.watch_namespaces,
            namespaces=self.settings.watch_namespaces,
            liveness_endpoint=f"http://0.0.0.0:{self.settings.health_port}/healthz",
        )

    def registry(self) -> kopf.OperatorRegistry:
        """Handlers for every watched kind, the login, and the liveness probe."""
        registry = kopf.OperatorRegistry()
        for kind in WATCHED:
            kopf.on.event(kind.group, kind.version, kind.plural, id=kind.plural, registry=registry)(self._handler(kind))
        kopf.on.login(registry=registry)(lambda **_: login(self.kopf_settings))
        kopf.on.probe(id="workers", registry=registry)(self._probe)
        return registry

    def _handler(self, kind: Kind) -> Any:
        async def on_event(event: Any, **_: Any) -> None:
            manifest = {"apiVersion": kind.api_version, "kind": kind.kind, **event["object"]}
            gone = event["type"] == "DELETED"
            changed = self.index.remove(kind, manifest) if gone else self.index.put(kind, manifest)
            if gone and kind is LLM_DEPLOYMENT:
                self.reconciler.forget(manifest["metadata"]["uid"])
            if changed:
                for key in interested(kind, manifest):
                    self.queue.add(key)

        return on_event

    async def _probe(self, **_: Any) -> float:
        """Bad when a worker hangs: only a restart helps then. An API server that is away is no reason to restart."""
        seconds = self.queue.longest_running_seconds()
        if seconds > HUNG_WORKER_SECONDS:
            raise kopf.PermanentError(f"a worker has been busy for {seconds:.0f} seconds")
        return round(seconds, 1)

    # Listings

    async def _first_listing(self) -> None:
        """Before anything is written, know everything: an empty index would look like a world without children."""
        told = ""
        while True:
            try:
                await self.resync()
                return
            except ApiError as error:
                problem = f"{error.status} {error.message}"
                if error.status == 404:
                    problem = "the CRD llmdeployments.millstream.dev is not installed: kubectl apply -f crds/"
            except ApiUnreachable as error:
                problem = str(error)
            if problem != told:
                log.warning("waiting for the API server: %s", problem)
                told = problem
            await asyncio.sleep(RESYNC_RETRY_SECONDS)

    async def resync(self) -> None:
        """Compare the index with whole listings, and enqueue whom a difference is about."""
        namespaces: tuple[str | None, ...] = self.settings.watch_namespaces or (None,)
        for kind in WATCHED:
            items: list[dict[str, Any]] = []
            version = "0"
            for namespace in namespaces:
                found, version = await self.client.list(kind, namespace, label_selector(kind))
                items += found
            for key in self.index.replace(kind, items, version):
                self.queue.add(key)

    async def _resync_for_ever(self) -> None:
        while True:
            await asyncio.sleep(RESYNC_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
            try:
                await self.resync()
            except (ApiError, ApiUnreachable) as error:
                log.warning("resync: %s", error)
