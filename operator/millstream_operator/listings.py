"""Whole listings: at the start, at a take-over, and periodically, since a broken watch can miss a deletion.

    GET every watched kind ─▶ index.replace ─▶ LLMDeployments with a difference ─▶ queue
    GET of the API groups ──▶ optional kinds that are served ─▶ all LLMDeployments, where that changed

The first listing comes before any write: an empty index would look like a cluster without children.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from millstream_operator.facts.gpu_watch import GpuWatch
from millstream_operator.kube.client import LIST_PAGE, ApiError, ApiUnreachable, ClusterClient
from millstream_operator.kube.fence import steady_seconds
from millstream_operator.kube.index import Index, OwnerKey
from millstream_operator.kube.kinds import WATCHED, Kind, label_selector
from millstream_operator.kube.optional_kinds import OptionalKinds
from millstream_operator.kube.watch_freshness import WatchFreshness

log = logging.getLogger(__name__)

RESYNC_SECONDS = 300.0
RESYNC_RETRY_SECONDS = 5.0
LISTINGS_AT_ONCE = 3  # the API server reads one page while we decode the last one


@dataclass
class Listings:
    """`notice` enqueues one LLMDeployment, `notice_all` all of them. `namespaces`: `(None,)` for the whole cluster."""

    client: ClusterClient
    index: Index
    freshness: WatchFreshness
    gpus: GpuWatch
    optional: OptionalKinds
    namespaces: tuple[str | None, ...]
    notice: Callable[[OwnerKey], None]
    notice_all: Callable[[], None]
    discovery_seconds: float
    complete: bool = False  # whether the index is complete
    page_objects: int = LIST_PAGE  # of a page that is not too large, by what was listed so far

    async def first(self) -> None:
        """List everything. Waits for the API server as long as it takes, and logs why."""
        logged = ""
        while True:
            try:
                await self.resync()
                self.complete = True
                return
            except ApiError as error:
                problem = f"{error.status} {error.message}"
                if error.status == 404:
                    problem = "the CRD llmdeployments.millstream.dev is not installed: kubectl apply -f crds/"
            except ApiUnreachable as error:
                problem = str(error)
            if problem != logged:
                log.warning("waiting for the API server: %s", problem)
                logged = problem
            await asyncio.sleep(RESYNC_RETRY_SECONDS)

    async def resync(self) -> None:
        """Compare the index with whole listings, and enqueue each LLMDeployment with a difference.

        Raises:
            ApiError, ApiUnreachable: nothing is forgotten; the next resync repeats it.
        """
        several = asyncio.Semaphore(LISTINGS_AT_ONCE)
        # Wait for all of them: none may overlap with the next try.
        ends = await asyncio.gather(*(self._list(kind, several) for kind in WATCHED), return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end
        await self.gpus.list(self.client, steady_seconds())
        await self.discover()

    async def _list(self, kind: Kind, several: asyncio.Semaphore) -> None:
        async with several:
            present: set[tuple[str, str]] = set()
            versions: list[int] = []
            for namespace in self.namespaces:
                versions.append(int(await self._list_pages(kind, namespace, present)))
        # An object created after the first listing may be missing in it and is not gone.
        for key in self.index.remove_absent(kind, present, str(min(versions))):
            self.notice(key)
        self.freshness.listed(kind, present, steady_seconds())

    async def _list_pages(self, kind: Kind, namespace: str | None, present: set[tuple[str, str]]) -> str:
        """Put each page into the index before the next one is read: all pages of large objects exceed the memory.

        Return the version of the listing.
        """
        selector, version = label_selector(kind), ""
        async for page in self.client.pages(kind, namespace, {"labelSelector": selector} if selector else {}):
            items = [{"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in page.items]
            present.update((item["metadata"]["namespace"], item["metadata"]["name"]) for item in items)
            for key in self.index.put_page(kind, items):
                self.notice(key)
            version, self.page_objects = page.version, min(self.page_objects, page.num_objects)
        return version

    async def discover(self) -> None:
        """Find out which optional kinds are served; another set of them concerns all LLMDeployments."""
        found = await self.optional.discover(self.client)
        for key in found.changed:
            self.notice(key)
        if found.other_kinds:
            self.notice_all()

    async def discover_forever(self) -> None:
        while True:
            await asyncio.sleep(self.discovery_seconds * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
            try:
                await self.discover()
            except (ApiError, ApiUnreachable) as error:
                log.info("discovering optional kinds: %s", error)

    async def resync_forever(self) -> None:
        while True:
            await asyncio.sleep(RESYNC_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
            try:
                await self.resync()
            except (ApiError, ApiUnreachable) as error:
                log.warning("resync: %s", error)
