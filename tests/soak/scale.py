"""A thousand LLMDeployments over five hundred GPU nodes: how fast, how quiet, how small.

The yardstick is a bare client in this same run: it writes the children of as many LLMDeployments, with the same
server-side applies, to the same API server, and does nothing else. It writes through the same kind of proxy, which is
the bench's and not the operator's, and takes its part of the machine. The client writes once before and once after the
operator, and the faster one counts.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.soak import snapshot
from tests.soak.api import ALL_LLMDEPLOYMENTS, Api, Object, eventually, is_ready, llmd, llmd_path
from tests.soak.load import for_each, summary
from tests.soak.operator_process import OperatorProcess
from tests.soak.progress import Say, silent
from tests.soak.proxy import Exchange, FaultProxy
from tests.soak.world import OPERATOR_NAMESPACE, World

Result = dict[str, Any]
TOGETHER = 16  # as many connections as the operator opens
NAMESPACES = 20
APPLY_SECONDS = 1800.0
SAMPLE_SECONDS = 60.0
# Written by the API server or by others, not by the applier of a child.
_SERVERS_OWN = (
    *("uid", "resourceVersion", "creationTimestamp", "managedFields", "generation", "ownerReferences", "namespace"),
)
SETTINGS = {
    "MILLSTREAM_LEADER_ELECTION": "Enabled",
    "MILLSTREAM_LEASE_NAME": "scale",
    "MILLSTREAM_OPERATOR_NAMESPACE": OPERATOR_NAMESPACE,
}
Child = tuple[str, Object]  # path of its collection below the namespace, as `/api/v1|services`; the object


def gpu_spec() -> Object:
    """One GPU a replica. Its inspection is answered with the demo model's shape."""
    return {
        "model": {"servedName": "demo-chat", "source": {"local": {"path": "demo-chat"}}},
        "engine": {"maxModelLen": 4096},
    }


@dataclass
class Scale:
    """One run. `objects`: LLMDeployments; `samples`: changes whose way is timed."""

    world: World
    objects: int
    samples: int
    idle_seconds: float
    say: Say
    yardstick: bool = True  # also write it all by the bare client, and delete it all
    seed: int = 1
    result: Result = field(default_factory=dict)

    async def run(self) -> Result:
        await self.world.delete_llmdeployments()
        # A second run on the same control plane meets the namespaces of the first.
        self.many, first, second = (self.world.numbered(word) for word in ("many", "bare-1", "bare-2"))
        names = [(f"{self.many}-{n % NAMESPACES:02}", f"llm-{n:04}") for n in range(self.objects)]
        for word in (self.many, first, second):
            for n in range(NAMESPACES):
                await self.world.admin.create("/api/v1/namespaces", {"metadata": {"name": f"{word}-{n:02}"}})
        async with OperatorProcess(self.world.plane, "scale", SETTINGS) as operator:
            self.operator = operator
            await operator.wait_leading()
            pattern = await self._pattern()
            self.result["objects"] = {"llmdeployments": self.objects, "children": self.objects * len(pattern)}
            await operator.stop()
            bare = [await self._bare(first, names, pattern)] if self.yardstick else []
            operator.start_again()
            await operator.wait_leading()
            await self._apply(names, len(pattern))
            await self._latencies(names)
            await self._idle("idle")
            await self._restart()
            await self._idle("idle after the restart", longest_seconds=60.0)
            self.result["crashes"] = operator.crashes
            await operator.stop()
            if not self.yardstick:
                return self.result
            await self._delete_all(names)
            bare.append(await self._bare(second, names, pattern, clean_up=False))
        self.result["bare_client_seconds"] = [round(seconds, 1) for seconds in bare]
        self.result["ratio"] = round(self.result["apply"]["all_children_seconds"] / min(bare), 2)
        return self.result

    # The bare client

    async def _pattern(self) -> list[Child]:
        """The children of one LLMDeployment, as somebody who knows them would apply them."""
        namespace = await self.world.namespace("pattern")
        await self.world.admin.create(llmd_path(namespace), llmd("demo", gpu_spec()))
        await self._ready(namespace, "demo")
        found = []
        for version, plural in self.world.kinds:
            for item in await self.world.admin.items(f"{version}/namespaces/{namespace}/{plural}"):
                owners = item["metadata"].get("ownerReferences") or []
                if any(owner["kind"] == "LLMDeployment" for owner in owners):
                    kind, api = await self._kind(version, plural)
                    found.append((f"{version}|{plural}", _as_applied(item, kind, api)))
        await self.world.admin.delete(llmd_path(namespace, "demo"))
        return found

    async def _kind(self, version: str, plural: str) -> tuple[str, str]:
        listed = await self.world.admin.request("GET", version)
        return next(one["kind"] for one in listed["resources"] if one["name"] == plural), listed["groupVersion"]

    async def _bare(
        self, word: str, names: list[tuple[str, str]], pattern: list[Child], *, clean_up: bool = True
    ) -> float:
        """Write everything the operator would write, and wait for nothing but the answers."""
        text = json.dumps(pattern)

        async def write(one: tuple[str, str]) -> None:
            namespace, name = one[0].replace(self.many, word), one[1]
            for place, child in json.loads(_renamed(text, name)):
                version, _, plural = place.partition("|")
                path = f"{version}/namespaces/{namespace}/{plural}/{child['metadata']['name']}"
                await client.apply(path, child, "bare-client")

        context = self.world.plane.ssl_context()
        proxy = FaultProxy(self.world.plane.url, context)
        await proxy.start()
        client = Api(proxy.url, "admin", context, TOGETHER)
        cpu = self.world.plane.cpu_seconds()
        try:
            seconds = await for_each(names, write, TOGETHER)
        finally:
            await client.close()
            await proxy.stop()
        self._control_plane_cpu(word.rpartition("-")[0], cpu)
        self.say(f"bare client: {len(names) * len(pattern)} objects in {seconds:.1f} s")
        if not clean_up:
            return seconds
        await for_each([f"{word}-{n:02}" for n in range(NAMESPACES)], self._empty, 4)
        await self._until_no_pods(word)
        return seconds

    async def _empty(self, namespace: str) -> None:
        await self.world.admin.delete(f"/api/v1/namespaces/{namespace}")

    async def _until_no_pods(self, word: str) -> None:
        async def left() -> int:
            pods = await self.world.admin.items("/apis/apps/v1/replicasets")
            return sum(pod["metadata"]["namespace"].startswith(word) for pod in pods)

        await eventually(left, lambda n: n == 0, what="empty", seconds=APPLY_SECONDS, pause_seconds=2)

    # The operator

    async def _apply(self, names: list[tuple[str, str]], children_each: int) -> None:
        """All at once; until every child was answered for, and until every model is Ready."""
        loop = asyncio.get_running_loop()
        cpu, plane, began = self.operator.process.cpu_seconds(), self.world.plane.cpu_seconds(), loop.time()

        async def create(one: tuple[str, str]) -> None:
            await self.world.admin.create(llmd_path(one[0]), llmd(one[1], gpu_spec()))

        applied = await for_each(names, create, TOGETHER)
        wanted = len(names) * children_each

        async def written() -> int:
            return len({x.asked.path for x in self._answered(began) if _is_child(x)})

        await eventually(written, lambda n: n >= wanted, what=f"{wanted} children", seconds=APPLY_SECONDS)
        self._control_plane_cpu("operator", plane)
        children = [x.answered_at for x in self._answered(began) if _is_child(x)]
        self.result["apply"] = {
            "llmdeployments_created_seconds": round(applied, 1),
            "all_children_seconds": round(max(children) - began, 1),
            "operator_cpu_seconds": round(self.operator.process.cpu_seconds() - cpu, 1),
        }
        self.say(f"all {wanted} children after {max(children) - began:.1f} s")

        async def ready() -> int:
            return sum(map(is_ready, await self.world.admin.items(ALL_LLMDEPLOYMENTS)))

        await eventually(ready, lambda n: n >= len(names), what="all Ready", seconds=APPLY_SECONDS, pause_seconds=1)
        self.result["apply"] |= {
            "all_ready_seconds": round(loop.time() - began, 1),
            "writes": len(self.operator.proxy.writes(began)),
        }
        self._memory("after the apply")
        self.say(f"all Ready after {loop.time() - began:.1f} s")

    def _written(self, since: float) -> list[str]:
        """Each write since a time, by its object."""
        asked = [x.asked for x in self.operator.proxy.writes(since)]
        return sorted({f"{x.method} {x.resource} {x.namespace}/{x.name}" for x in asked})

    def _answered(self, since: float) -> list[Exchange]:
        return [x for x in self.operator.proxy.writes(since) if 200 <= x.status < 300]

    async def _latencies(self, names: list[tuple[str, str]]) -> None:
        """A spec changes, a child is deleted, a child is edited: until the operator's first write in that place."""
        chooser = random.Random(self.seed)
        kinds: dict[str, Callable[[str, str], Awaitable[object]]] = {
            "spec_change_to_first_write": self._change_spec,
            "deleted_child_repaired": self._delete_child,
            "edited_child_repaired": self._edit_child,
        }
        for word, change in kinds.items():
            chosen = chooser.sample(names, min(self.samples, len(names)))
            took: list[float] = []
            for namespace, name in chosen:
                took.append(await self._timed(namespace, name, change, repaired="repaired" in word))
            self.result[word] = summary(took)
            self.say(f"{word}: {self.result[word]}")

    async def _timed(
        self, namespace: str, name: str, change: Callable[[str, str], Awaitable[object]], *, repaired: bool
    ) -> float:
        """Seconds from when the API server had answered the change. First write: sent; repair: answered."""
        await change(namespace, name)
        loop = asyncio.get_running_loop()
        began = loop.time()
        behind = len(self.operator.proxy.exchanges) - 50  # a write may be quicker than the answer to the change

        async def look() -> float | None:
            for x in self.operator.proxy.exchanges[max(0, behind) :]:
                mine = x.asked.namespace == namespace and x.asked.name.startswith(name)
                if mine and x.asked.writes and x.asked.at > began - 1:
                    if not repaired:
                        return max(0.0, x.asked.at - began)
                    if x.answered_at and 200 <= x.status < 300 and x.asked.resource in ("services", "deployments"):
                        return max(0.0, x.answered_at - began)
            return None

        found = await eventually(
            look, lambda x: x is not None, what="written", seconds=SAMPLE_SECONDS, pause_seconds=0.01
        )
        await self._ready(namespace, name)
        return found or 0.0

    async def _change_spec(self, namespace: str, name: str) -> object:
        """The Service's port: something that is seen at once, and starts no pods."""
        return await self.world.admin.merge(llmd_path(namespace, name), {"spec": {"service": {"port": 8080}}})

    async def _delete_child(self, namespace: str, name: str) -> object:
        await self.world.admin.delete(f"/api/v1/namespaces/{namespace}/services/{name}")
        return None

    async def _edit_child(self, namespace: str, name: str) -> object:
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}"
        return await self.world.admin.merge(path, {"spec": {"replicas": 0}})

    async def _idle(self, word: str, longest_seconds: float | None = None) -> None:
        """Touch nothing, and count what the operator does."""
        loop = asyncio.get_running_loop()
        await self._until_quiet()
        seconds = min(self.idle_seconds, longest_seconds or self.idle_seconds)
        cpu, began = self.operator.process.cpu_seconds(), loop.time()
        await asyncio.sleep(seconds)
        requests = [x for x in self.operator.proxy.exchanges if x.asked.at >= began and not x.asked.about_lease]
        self.result[word] = {
            "seconds": seconds,
            "writes": len(self.operator.proxy.writes(began)),
            "written": self._written(began),
            "lease_writes": len(self.operator.proxy.writes(began, lease=True)),
            "other_requests": len(requests),
            "operator_cpu_seconds": round(self.operator.process.cpu_seconds() - cpu, 2),
            "what": sorted({f"{x.asked.method} {x.asked.resource}" for x in requests}),
        }
        self._memory(word)
        self.say(f"{word}: {self.result[word]}")

    async def _restart(self) -> None:
        """SIGTERM and a new process, as a rolling update does it: until it leads and its queue is empty."""
        await self.operator.stop()
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.operator.start_again()
        await self.operator.wait_ready()
        listed = loop.time() - began
        await self._until_quiet(at_least_reconciles=self.objects)
        self.result["restart"] = {
            "listed_seconds": round(listed, 1),
            "steady_seconds": round(loop.time() - began, 1),
            "writes": len(self.operator.proxy.writes(began)),
            "written": self._written(began),
            "operator_cpu_seconds": round(self.operator.process.cpu_seconds(), 1),
        }
        self._memory("after the restart")
        self.say(f"restart: {self.result['restart']}")

    async def _until_quiet(self, at_least_reconciles: int = 0) -> None:
        """Nothing due and nothing running in the operator's queue, and no Event still to be written."""

        async def busy() -> float:
            values = await self.operator.metrics()
            done = sum(
                count for name, count in values.items() if name.startswith("millstream_operator_reconciles_total")
            )
            depth = [
                values.get(f"millstream_operator_queue_depth{{state={state}}}", 0.0) for state in ("due", "running")
            ]
            news = values.get("millstream_operator_events_waiting", 0.0)
            return sum(depth) + news + max(0.0, at_least_reconciles - done)

        await eventually(busy, lambda n: n == 0, what="quiet", seconds=APPLY_SECONDS, pause_seconds=0.2)

    async def _delete_all(self, names: list[tuple[str, str]]) -> None:
        """The operator is away: owner references alone must do it."""
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def delete(one: tuple[str, str]) -> None:
            await self.world.admin.delete(llmd_path(*one))

        await for_each(names, delete, TOGETHER)
        await self._until_no_pods(self.many)
        left = await snapshot.read_all(self.world.admin, self.world.kinds)
        orphans = [
            f"{namespace}: {key}"
            for namespace, found in left.items()
            if namespace.startswith(self.many)
            for key in snapshot.of_namespace(found)
            if key != "counted"
        ]
        self.result["deleted_without_operator"] = {
            "seconds": round(loop.time() - began, 1),
            "orphans": orphans,
        }

    async def _ready(self, namespace: str, name: str) -> None:
        await eventually(
            lambda: self.world.admin.request("GET", llmd_path(namespace, name)), is_ready, what="Ready", seconds=120
        )

    def _control_plane_cpu(self, word: str, before: float) -> None:
        """Processor time of API server, etcd, controllers and kwok in a phase."""
        spent = self.world.plane.cpu_seconds() - before
        self.result.setdefault("control_plane_cpu_seconds", {})[word] = round(spent, 1)

    def _memory(self, word: str) -> None:
        now, most = self.operator.process.memory_bytes()
        self.result.setdefault("memory_mib", {})[word] = {"now": now >> 20, "most": most >> 20}


async def scale(
    world: World,
    *,
    objects: int,
    samples: int,
    idle_seconds: float,
    say: Say = silent,
    yardstick: bool = True,
) -> Result:
    """The whole run, in the order of a day: apply, change, rest, restart, delete."""
    return await Scale(world, objects, samples, idle_seconds, say, yardstick).run()


def _renamed(text: str, name: str) -> str:
    """The children of `demo` as those of another; the model stays demo-chat."""
    return text.replace("demo-chat", "@MODEL@").replace("demo", name).replace("@MODEL@", "demo-chat")


def _as_applied(item: Object, kind: str, api_version: str) -> Object:
    """A live object as its author sent it: without what the server adds. Defaults do no harm in a second apply."""
    metadata = {key: value for key, value in item["metadata"].items() if key not in _SERVERS_OWN}
    sent = {key: value for key, value in item.items() if key not in ("metadata", "status", "apiVersion", "kind")}
    if kind == "Service":
        sent["spec"] = {k: v for k, v in sent["spec"].items() if k not in ("clusterIP", "clusterIPs")}
    metadata.get("annotations", {}).pop("deployment.kubernetes.io/revision", None)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **sent}


def _is_child(exchange: Exchange) -> bool:
    """A Job is none: it asks for a model's shape, and is gone when the answer is written down."""
    asked = exchange.asked
    return asked.resource not in ("llmdeployments", "events", "jobs") and asked.method in ("PATCH", "POST")
