"""An API server over HTTP, as far as kopf and the operator ask it: discovery, lists, watches, apply, a Lease.

The outermost edge, faked: real processes speak with it through real sockets. It validates nothing and owns no fields;
what it knows is who wrote what when, and it can be away.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from millstream_operator.kube.kinds import EVENT, LEASE, NODE, WATCHED, Kind

Manifest = dict[str, Any]
KINDS = (*WATCHED, EVENT, LEASE, NODE)


@dataclass(frozen=True, slots=True)
class Written:
    agent: str
    verb: str
    kind: str
    name: str
    version: int


@dataclass
class FakeApiServer:
    """Objects by kind, namespace and name; `writes` holds every accepted write in order."""

    objects: dict[tuple[str, str, str], Manifest] = field(default_factory=dict)
    writes: list[Written] = field(default_factory=list)
    listings: Counter[tuple[str, str]] = field(default_factory=Counter)  # by agent and kind
    away: bool = False
    lists: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: a listing waits for its answer
    version: int = 100
    _history: list[tuple[Kind, Manifest]] = field(default_factory=list)
    _watchers: defaultdict[str, set[asyncio.Queue[Manifest]]] = field(default_factory=lambda: defaultdict(set))

    async def start(self) -> tuple[web.AppRunner, str]:
        """Listen on a free port; what ends it, and its URL."""
        self.lists.set()
        app = web.Application(middlewares=[self._maybe_away])
        app.router.add_get("/api", partial(_answer, {"versions": ["v1"]}))
        app.router.add_get("/apis", partial(_answer, {"groups": list(_groups())}))
        for base in {kind.path(None).rpartition("/")[0] for kind in KINDS}:
            app.router.add_get(base, partial(_answer, _resources(base)))
        for kind in KINDS:
            every, one = kind.path(None), kind.path("{namespace}", "{name}")
            app.router.add_get(every, partial(self._list, kind))
            app.router.add_post(kind.path("{namespace}"), partial(self._create, kind))
            for path in (one, f"{one}/status"):
                app.router.add_route("*", path, partial(self._one, kind))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return runner, f"http://{host}:{port}"

    def put(self, kind: Kind, manifest: Manifest) -> Manifest:
        """Store a state of an object as the newest, and tell the watches."""
        metadata = manifest["metadata"]
        key = kind.kind, metadata["namespace"], metadata["name"]
        old = self.objects.get(key)
        self.version += 1
        kept = {"uid": f"uid-{self.version}", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
        kept = {name: old["metadata"][name] for name in kept} if old else kept
        new = {**manifest, "metadata": {**metadata, **kept, "resourceVersion": str(self.version)}}
        self.objects[key] = new
        self._tell(kind, "MODIFIED" if old else "ADDED", new)
        return new

    def remove(self, kind: Kind, namespace: str, name: str) -> None:
        gone = self.objects.pop((kind.kind, namespace, name))
        self.version += 1
        gone = {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self.version)}}
        self._tell(kind, "DELETED", gone)

    def names(self, kind: Kind) -> set[str]:
        return {name for (known, _, name) in self.objects if known == kind.kind}

    def writers(self) -> list[str]:
        """Who wrote, the Lease left out, without repetition of one after itself."""
        agents = [write.agent for write in self.writes if write.kind != LEASE.kind]
        return [agent for before, agent in zip([None, *agents], agents, strict=False) if agent != before]

    def _tell(self, kind: Kind, what: str, manifest: Manifest) -> None:
        event = {"type": what, "object": manifest}
        self._history.append((kind, event))
        for queue in self._watchers[kind.kind]:
            queue.put_nowait(event)

    @web.middleware
    async def _maybe_away(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.away and request.transport is not None:
            request.transport.abort()
            return web.Response()
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _list(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") == "true":
            return await self._watch(kind, request)
        first = int(request.query.get("continue") or 0)
        if not first:
            self.listings[request.headers.get("User-Agent", ""), kind.kind] += 1
        await self.lists.wait()
        items = [manifest for key, manifest in self.objects.items() if key[0] == kind.kind]
        end = first + int(request.query.get("limit") or len(items))
        metadata = {"resourceVersion": str(self.version)} | ({"continue": str(end)} if end < len(items) else {})
        return await _json({"metadata": metadata, "items": items[first:end]})

    async def _watch(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        queue: asyncio.Queue[Manifest] = asyncio.Queue()
        since = int(request.query.get("resourceVersion", 0))
        for event_kind, event in self._history:  # a watch that comes back misses nothing
            if event_kind is kind and int(event["object"]["metadata"]["resourceVersion"]) > since:
                queue.put_nowait(event)
        self._watchers[kind.kind].add(queue)
        try:
            await response.prepare(request)
            while not self.away:
                try:
                    async with asyncio.timeout(0.2):
                        event = await queue.get()
                except TimeoutError:
                    continue
                await response.write(json.dumps(event).encode() + b"\n")
        except ConnectionResetError:
            pass  # the client is gone
        finally:
            self._watchers[kind.kind].discard(queue)
        if request.transport is not None:
            request.transport.abort()
        return response

    async def _create(self, kind: Kind, request: web.Request) -> web.Response:
        manifest = await request.json()
        namespace, name = request.match_info["namespace"], manifest["metadata"].get("name") or f"event-{self.version}"
        if (kind.kind, namespace, name) in self.objects:
            return await _json({"reason": "AlreadyExists", "message": f"{name} exists"}, 409)
        manifest["metadata"] |= {"namespace": namespace, "name": name}
        return await self._written(request, kind, "create", manifest)

    async def _one(self, kind: Kind, request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        live = self.objects.get((kind.kind, namespace, name))
        if live is None and request.method != "PATCH":
            return await _json({"reason": "NotFound", "message": f"{name} not found"}, 404)
        if request.method == "GET":
            return await _json(live)
        body = await request.json()
        if request.method == "DELETE":
            self.remove(kind, namespace, name)
            self._record(request, kind, "delete", name)
            return await _json({"status": "Success"})
        if live is not None and body["metadata"].get("resourceVersion") not in (
            None,
            live["metadata"]["resourceVersion"],
        ):
            return await _json({"reason": "Conflict", "message": f"{name} has been modified"}, 409)
        if request.path.endswith("/status"):
            return await self._written(request, kind, "status", {**(live or {}), "status": body["status"]})
        return await self._written(
            request, kind, request.method.lower(), {**body, "status": (live or {}).get("status")}
        )

    async def _written(self, request: web.Request, kind: Kind, verb: str, manifest: Manifest) -> web.Response:
        new = self.put(kind, {name: value for name, value in manifest.items() if value is not None})
        self._record(request, kind, verb, new["metadata"]["name"])
        return await _json(new)

    def _record(self, request: web.Request, kind: Kind, verb: str, name: str) -> None:
        self.writes.append(Written(request.headers.get("User-Agent", ""), verb, kind.kind, name, self.version))


async def _answer(body: object, _: web.Request) -> web.Response:
    return web.json_response(body)


async def _json(body: object, status: int = 200) -> web.Response:
    return web.json_response(body, status=status)


def _groups() -> Iterator[Manifest]:
    for group, version in sorted({(kind.group, kind.version) for kind in KINDS if kind.group}):
        group_version = {"groupVersion": f"{group}/{version}", "version": version}
        yield {"name": group, "versions": [group_version], "preferredVersion": group_version}


def _resources(base: str) -> Manifest:
    kinds = [kind for kind in KINDS if kind.path(None).rpartition("/")[0] == base]
    verbs = ["get", "list", "watch", "create", "update", "patch", "delete"]
    resources = [
        {"name": k.plural, "singularName": k.kind.lower(), "kind": k.kind, "namespaced": True, "verbs": verbs}
        for k in kinds
    ]
    if base == "/api/v1":  # kopf waits until it knows them, though it asks for none
        resources.append(
            {"name": "namespaces", "singularName": "", "kind": "Namespace", "namespaced": False, "verbs": verbs}
        )
    return {"resources": resources}


def write_kubeconfig(path: Path, url: str) -> Path:
    """A kubeconfig for it."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "users": [{"name": "fake", "user": {"token": "fake"}}],
    }
    path.write_text(yaml.safe_dump(config))
    return path
