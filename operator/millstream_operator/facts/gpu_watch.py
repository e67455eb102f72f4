"""Nodes and the GPUs that pods hold, all of the cluster: listed, then watched, and almost all of it dropped at once.

    GET nodes, GET pods that are bound and have not ended ─▶ page by page ─▶ GpuNode, GpuPod ─▶ ClusterFacts
    watch of both, from there on ────────────────────────────────────────────────────▲

kopf's watches are for LLMDeployments and their children, chosen by a label; GPUs are also held by pods of others. So
this is a second, smaller pair of watches: what is not a GPU is gone before the next event is read, and what is kept of
a pod are five words. Both are read-only and cluster-wide. Where the operator has no right to them, plans are made
without: `ClusterFacts.problem` says so in every plan, and it is tried again now and then.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

from millstream_operator.facts.cluster_facts import ClusterFacts
from millstream_operator.inventory.nodes import GpuNode, read_node
from millstream_operator.inventory.pods import GpuPod, holds_gpus
from millstream_operator.kube.client import ApiError, ApiUnreachable, ClusterClient
from millstream_operator.kube.kinds import NODE, POD, Kind
from millstream_operator.rendering.names import DEPLOYMENT_LABEL, REVISION_LABEL

log = logging.getLogger(__name__)
Manifest = dict[str, Any]

BOUND = {"fieldSelector": "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"}
PAGE = 100  # pods are large, and a page is all that is ever in memory
WATCH_SECONDS = 290
# A watch that broke in silence is caught by a whole listing.
RELIST_SECONDS = 1800.0
RETRY_SECONDS = 5.0
FORBIDDEN_RETRY_SECONDS = 300.0
DISABLED = "The operator does not look at nodes (its setting MILLSTREAM_INVENTORY is Disabled)."


class GpuWatch:
    """Keeps a ClusterFacts up to date. `list` first, then `run` for ever."""

    def __init__(self, book: ClusterFacts, *, enabled: bool = True) -> None:
        self._book, self._enabled = book, enabled
        self._versions: dict[Kind, str] = {}  # listed up to here; a kind that is missing has to be listed
        self._listed_at = float("-inf")
        if not enabled:
            book.problem = DISABLED

    async def list(self, client: ClusterClient, now: float) -> None:
        """List both, unless that was done a short while ago. Without rights the book has a problem, and no error.

        Raises:
            ApiError, ApiUnreachable: what may pass by itself.
        """
        if not self._enabled or now - self._listed_at < RELIST_SECONDS:
            return
        try:
            await self._list_nodes(client)
            await self._list_pods(client)
        except ApiError as error:
            if error.status != 403:
                raise
            self._forbidden(error)
        else:
            self._book.problem = None
        self._listed_at = now

    async def run(self, client: ClusterClient) -> None:
        """Watch both for ever."""
        if self._enabled:
            await asyncio.gather(self._follow(client, NODE), self._follow(client, POD))

    async def _follow(self, client: ClusterClient, kind: Kind) -> None:
        list_it, learn = (self._list_nodes, self._node) if kind is NODE else (self._list_pods, self._pod)
        while True:
            seconds = RETRY_SECONDS
            try:
                if kind not in self._versions:
                    await list_it(client)
                    if len(self._versions) == 2:
                        self._book.problem = None
                await self._watch(client, kind, learn)
                continue
            except ApiError as error:
                if error.status in (403, 410):  # no right to it, or the version is forgotten: list anew
                    self._versions.pop(kind, None)
                if error.status == 403:
                    self._forbidden(error)
                    seconds = FORBIDDEN_RETRY_SECONDS
                log.info("watching %s: %s %s", kind.plural, error.status, error.message)
            except ApiUnreachable as error:
                log.info("%s", error)
            await asyncio.sleep(seconds * random.uniform(0.8, 1.2))  # noqa: S311 - jitter

    async def _watch(self, client: ClusterClient, kind: Kind, learn: Callable[[str, Manifest], None]) -> None:
        query = BOUND if kind is POD else {}
        async with aclosing(client.watch(kind, query, self._versions[kind], WATCH_SECONDS)) as events:
            async for event in events:
                said, found = event["type"], event["object"]
                if said == "ERROR":
                    raise ApiError(int(found.get("code", 500)), found.get("reason", ""), found.get("message", ""))
                if said != "BOOKMARK":
                    learn(said, found)
                self._versions[kind] = found["metadata"]["resourceVersion"]

    def _forbidden(self, error: ApiError) -> None:
        problem = f"The operator may not look at the cluster's GPUs: {error.message}"[:500]
        if self._book.problem != problem:
            log.warning("%s. Plans are made from specs alone.", problem)
        self._book.problem = problem

    # Nodes

    async def _list_nodes(self, client: ClusterClient) -> None:
        found: list[GpuNode] = []
        version = ""
        async for page in client.pages(NODE, None, {}, PAGE):
            found += filter(None, map(read_node, page.items))
            version = page.version
        self._book.replace_nodes(found)
        self._versions[NODE] = version

    def _node(self, said: str, node: Manifest) -> None:
        self._book.put_node(node["metadata"]["name"], None if said == "DELETED" else read_node(node))

    # Pods

    async def _list_pods(self, client: ClusterClient) -> None:
        found: list[GpuPod] = []
        version = ""
        async for page in client.pages(POD, None, BOUND, PAGE):
            found += filter(None, map(read_pod, page.items))
            version = page.version
        self._book.replace_pods(found)
        self._versions[POD] = version

    def _pod(self, said: str, pod: Manifest) -> None:
        self._book.put_pod(pod["metadata"]["uid"], None if said == "DELETED" else read_pod(pod))


def read_pod(pod: Mapping[str, Any]) -> GpuPod | None:
    """What is kept of a pod; None for one that holds no GPU."""
    held = holds_gpus(pod)
    if held is None:
        return None
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    name = labels.get(DEPLOYMENT_LABEL)
    owner = (metadata["namespace"], name) if name else None
    return GpuPod(metadata["uid"], held[0], held[1], owner, labels.get(REVISION_LABEL, ""))
