"""Where experiments take place: a control plane with the CRD and some GPU nodes, and namespaces as many as wanted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import yaml

from tests.soak import snapshot
from tests.soak.api import ALL_LLMDEPLOYMENTS, Api, Object, eventually, llmd_path
from tests.soak.control_plane import ControlPlane
from tests.soak.operator_process import ROOT
from tests.soak.simulated_nodes import add_nodes
from tests.soak.simulated_volumes import provision
from tests.soak.tools import Tools

CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
OPERATOR_NAMESPACE = "millstream-system"


@dataclass
class World:
    """The control plane, and what is known about it."""

    plane: ControlPlane
    kinds: list[tuple[str, str]]
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def admin(self) -> Api:
        return self.plane.admin

    def numbered(self, word: str) -> str:
        """A name that nothing else on this control plane has."""
        return f"{word}-{next(self._numbers):04}"

    async def namespace(self, word: str) -> str:
        """A new namespace."""
        name = self.numbered(word)
        await self.admin.create("/api/v1/namespaces", {"metadata": {"name": name}})
        return name

    async def delete_llmdeployments(self) -> None:
        """Delete what earlier tests left: to a release of another name each object is another's, of which it says so in
        an Event when it starts, and in a metric."""
        for item in await self.admin.items(ALL_LLMDEPLOYMENTS):
            await self.admin.delete(llmd_path(item["metadata"]["namespace"], item["metadata"]["name"]))
        await eventually(
            lambda: self.admin.items(ALL_LLMDEPLOYMENTS),
            lambda items: not items,
            what="no LLMDeployments of earlier tests",
            seconds=120,
            pause_seconds=0.2,
        )

    async def state(self, namespace: str, *, history: bool = True) -> snapshot.Snapshot:
        """The comparable state of a namespace."""
        found = await snapshot.read_one(self.admin, self.kinds, namespace)
        return snapshot.of_namespace(found, history=history)


@asynccontextmanager
async def world(
    tools: Tools, *, nodes: int = 4, keep: bool = False, collects_garbage: bool = True
) -> AsyncIterator[World]:
    """Start everything; afterwards nothing is left of it."""
    async with ControlPlane(tools, keep=keep, collects_garbage=collects_garbage) as plane:
        for path in sorted((ROOT / "crds").glob("*.yaml")):
            manifest: Object = yaml.safe_load(path.read_text())
            await plane.admin.create(CRD_PATH, manifest)
            await eventually(
                lambda name=manifest["metadata"]["name"]: plane.admin.request("GET", f"{CRD_PATH}/{name}"),  # type: ignore[misc]
                _established,
                what="the CRD established",
                seconds=30,
            )
        await plane.admin.create("/api/v1/namespaces", {"metadata": {"name": OPERATOR_NAMESPACE}})
        await add_nodes(plane.admin, nodes)
        plane.check()
        provisioner = asyncio.create_task(provision(plane.admin))
        try:
            yield World(plane, await snapshot.kinds(plane.admin))
        finally:
            provisioner.cancel()


def _established(crd: Object) -> bool:
    found = crd.get("status", {}).get("conditions") or []
    return any(one["type"] == "Established" and one["status"] == "True" for one in found)
