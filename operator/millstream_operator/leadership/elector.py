"""Leader election, the half with I/O: does what `Election` says, and opens or closes the fence.

One replica leads; the others watch, keep their index warm and wait. The Lease has a client of its own, so that a
renewal never waits behind a thousand reconciles, and its requests are not fenced: the fence depends on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import secrets
import socket
from collections.abc import Callable
from typing import Any, Protocol

from millstream_operator.kube.client import ApiError, ApiUnreachable, ClusterClient
from millstream_operator.kube.fence import Fence, steady_seconds
from millstream_operator.kube.kinds import LEASE
from millstream_operator.leadership.election import Election, LeaseRecord, ObservedLease, Read, Wait

log = logging.getLogger(__name__)
CONFLICT = 409  # also: it exists already


class LeaseStore(Protocol):
    """One Lease. Every call raises ApiError or ApiUnreachable."""

    async def read(self) -> ObservedLease | None: ...

    async def write(self, record: LeaseRecord, version: str | None) -> ObservedLease:
        """Create it (None), or replace exactly this version of it; otherwise ApiError 409."""
        ...


class LeaseObject:
    """The Lease `name` of the operator's namespace. Fields of other writers are kept.

    The client's timeout must be the Timing's `request_timeout_seconds`.
    """

    def __init__(self, client: ClusterClient, namespace: str, name: str) -> None:
        self._client, self._namespace, self._name = client, namespace, name
        self._live: dict[str, Any] = {}

    async def read(self) -> ObservedLease | None:
        live = await self._client.get(LEASE, self._namespace, self._name)
        return None if live is None else self._seen(live)

    async def write(self, record: LeaseRecord, version: str | None) -> ObservedLease:
        spec = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": int(record.duration_seconds),
            "acquireTime": record.acquire_time or None,
            "renewTime": record.renew_time or None,
            "leaseTransitions": record.transitions,
        }
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        before: dict[str, Any] = {}
        if version is not None:
            metadata = {**self._live.get("metadata", {}), **metadata, "resourceVersion": version}
            before = self._live.get("spec") or {}
        manifest = {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": metadata,
            "spec": {key: value for key, value in (before | spec).items() if value is not None},
        }
        return self._seen(await self._client.put(LEASE, manifest, create=version is None))

    def _seen(self, live: dict[str, Any]) -> ObservedLease:
        self._live = live
        spec = live.get("spec") or {}
        record = LeaseRecord(
            holder=spec.get("holderIdentity") or "",
            duration_seconds=spec.get("leaseDurationSeconds") or 0,
            acquire_time=spec.get("acquireTime") or "",
            renew_time=spec.get("renewTime") or "",
            transitions=spec.get("leaseTransitions") or 0,
        )
        return ObservedLease(record, live["metadata"]["resourceVersion"])


def new_identity() -> str:
    """Return the pod's name and a random suffix: a container that restarts in its pod is another holder."""
    return f"{socket.gethostname()}_{secrets.token_hex(4)}"


def utc_now() -> str:
    """Return the time in the format of a Lease: UTC with microseconds."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Elector:
    """Runs one Election and keeps the fence in step with it."""

    def __init__(
        self,
        store: LeaseStore,
        election: Election,
        fence: Fence,
        clock: Callable[[], float] = steady_seconds,
        wall: Callable[[], str] = utc_now,
    ) -> None:
        self._store, self._election, self._fence, self._clock, self._wall = store, election, fence, clock, wall
        self._changed = asyncio.Event()
        self._logged_problem = ""
        fence.close()

    @property
    def leading(self) -> bool:
        return self._election.leading(self._clock())

    @property
    def term(self) -> int:
        """How many times this replica became leader."""
        return self._election.term

    async def run(self) -> None:
        """Compete for the Lease until cancelled."""
        while True:
            pause_seconds = await self.step()
            await asyncio.sleep(pause_seconds)

    async def step(self) -> float:
        """Take the step that is due now. Return the seconds until the next one."""
        now = self._clock()
        step = self._election.next(now, self._wall())
        if isinstance(step, Wait):
            return max(0.0, step.until - now)
        try:
            if isinstance(step, Read):
                self._election.record_read(await self._store.read(), self._clock())
            else:
                self._election.record_write(await self._store.write(step.record, step.version), now, self._clock())
            self._log_problem("")
        except ApiError as error:
            if error.status == CONFLICT:
                self._election.record_conflict(self._clock())
            else:
                self._election.record_failure(self._clock())
                self._log_problem(f"{error.status} {error.message}")
        except ApiUnreachable as error:
            self._election.record_failure(self._clock())
            self._log_problem(str(error))
        self._move_fence()
        return 0.0

    async def acquire_if_free(self) -> bool:
        """Read the Lease once, and acquire it if it is free. Return whether this replica leads now."""
        for _ in ("read", "acquire"):
            await self.step()
            if self.leading or not self._election.free_now(self._clock()):
                break
        return self.leading

    async def wait_until_leading(self) -> int:
        """Wait until this replica leads. Return the term."""
        while not self.leading:
            await self._wait_for_change(None)
        return self.term

    async def wait_until_lost(self, term: int) -> None:
        """Wait until this term is over, also when it just expires."""
        while self.leading and self.term == term:
            await self._wait_for_change(self._election.write_until - self._clock())

    async def release(self) -> None:
        """Release the Lease, so that another replica takes over at once. Only when none of our writes is in flight."""
        led = self.leading
        self._fence.close()
        if not led:
            return
        if not self._fence.quiet():
            log.warning("the Lease is not released but left to expire: a write got no answer yet")
            return
        try:
            # A request may have been in flight when `run` was cancelled: read first.
            self._election.record_read(await self._store.read(), self._clock())
            if (step := self._election.release(self._wall())) is not None:
                await self._store.write(step.record, step.version)
                log.info("released the Lease")
        except (ApiError, ApiUnreachable) as error:
            log.warning("the Lease is not released but left to expire: %s", error)

    def _move_fence(self) -> None:
        if self.leading:
            self._fence.open(self._election.write_until, self._election.over_by)
        else:
            self._fence.close()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self, longest_seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_seconds):
                await self._changed.wait()

    def _log_problem(self, problem: str) -> None:
        """Log a problem once, not at every try."""
        if problem and problem != self._logged_problem:
            log.warning("the Lease: %s", problem)
        self._logged_problem = problem
