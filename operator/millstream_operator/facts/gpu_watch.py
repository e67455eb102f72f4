"""List and watch the cluster's nodes and pods, and keep only their GPUs.

    GET nodes, GET pods that are bound and have not ended ─▶ page by page ─▶ GpuNode, GpuPod ─▶ ClusterFacts
    watch of both, from there on ────────────────────────────────────────────────────▲

kopf's watches cover LLMDeployments and their children, selected by a label; other pods hold GPUs too. So this is a
second pair of watches, which keeps five fields of a pod with GPUs and drops everything else at once. Both are read-only
and cluster-wide. Where the operator has no right to them, plans are made without: `ClusterFacts.problem` says so in
every plan, and the watch is retried every five minutes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Any

from millstream_operator.facts.cluster_facts import ClusterFacts
from millstream_operator.facts.gpu_pods import read_pod
from millstream_operator.inventory.nodes import GpuNode, read_node, why_closed
from millstream_operator.inventory.pods import GpuPod
from millstream_operator.kube.client import ApiError, ApiUnreachable, ClusterClient
from millstream_operator.kube.kinds import NODE, POD, Kind

log = logging.getLogger(__name__)
Manifest = dict[str, Any]

BOUND = {"fieldSelector": "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"}
PAGE = 100  # pods are large; only one page is in memory at a time
WATCH_SECONDS = 290
# A whole listing catches what a broken watch missed.
RELIST_SECONDS = 1800.0
RETRY_SECONDS = 5.0
FORBIDDEN_RETRY_SECONDS = 300.0
DISABLED = "The operator does not read nodes (the chart's value inventory.mode, or MILLSTREAM_INVENTORY, is Disabled)."


class GpuWatch:
    """Keeps ClusterFacts up to date: call `list` first, then `run`."""

    def __init__(self, facts: ClusterFacts, *, enabled: bool = True) -> None:
        self._facts, self._enabled = facts, enabled
        self._versions: dict[Kind, str] = {}  # watched from here; a kind that is missing must be listed
        self._listed_at = float("-inf")
        if not enabled:
            facts.problem = DISABLED

    async def list(self, client: ClusterClient, now: float) -> None:
        """List both, unless they were listed recently. Missing rights become `ClusterFacts.problem` and no error.

        Raises:
            ApiError, ApiUnreachable: an error that a retry may not meet again.
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
            self._facts.problem = None
        self._listed_at = now

    async def run(self, client: ClusterClient) -> None:
        """Watch both until cancelled."""
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
                        self._facts.problem = None
                await self._watch(client, kind, learn)
                continue
            except ApiError as error:
                if error.status in (403, 410):  # no right to it, or the version has expired: list again
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
                event_type, found = event["type"], event["object"]
                if event_type == "ERROR":
                    raise ApiError(int(found.get("code", 500)), found.get("reason", ""), found.get("message", ""))
                if event_type != "BOOKMARK":
                    learn(event_type, found)
                self._versions[kind] = found["metadata"]["resourceVersion"]

    def _forbidden(self, error: ApiError) -> None:
        problem = f"The operator has no right to read the cluster's nodes and pods: {error.message}"[:500]
        if self._facts.problem != problem:
            log.warning("%s. Plans are made from specs alone.", problem)
        self._facts.problem = problem

    # Nodes

    async def _list_nodes(self, client: ClusterClient) -> None:
        found: list[GpuNode] = []
        closed: dict[str, str] = {}
        version = ""
        async for page in client.pages(NODE, None, {}, PAGE):
            found += filter(None, map(read_node, page.items))
            closed |= closed_nodes(page.items)
            version = page.version
        self._facts.replace_nodes(found, closed)
        self._versions[NODE] = version

    def _node(self, event_type: str, node: Manifest) -> None:
        name = node["metadata"]["name"]
        if event_type == "DELETED":
            self._facts.put_node(name, None)
        else:
            self._facts.put_node(name, read_node(node), why_closed(node))

    # Pods

    async def _list_pods(self, client: ClusterClient) -> None:
        found: list[GpuPod] = []
        version = ""
        async for page in client.pages(POD, None, BOUND, PAGE):
            found += filter(None, (read_pod(pod, self._facts.workloads) for pod in page.items))
            version = page.version
        self._facts.replace_pods(found)
        self._versions[POD] = version

    def _pod(self, event_type: str, pod: Manifest) -> None:
        found = None if event_type == "DELETED" else read_pod(pod, self._facts.workloads)
        self._facts.put_pod(pod["metadata"]["uid"], found)


def closed_nodes(nodes: Iterable[Manifest]) -> dict[str, str]:
    """Return why nodes take no pods now, by name; nodes that do are absent."""
    return {node["metadata"]["name"]: why for node in nodes if (why := why_closed(node)) is not None}
