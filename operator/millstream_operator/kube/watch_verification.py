"""Read objects again whose last state no watch has delivered: a watch that hangs looks like a cluster at rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from millstream_operator.kube.client import ApiError, ApiUnreachable, ClusterClient
from millstream_operator.kube.kinds import WATCHED, Kind
from millstream_operator.kube.watch_freshness import WatchFreshness

VERIFY_WATCHES_SECONDS = 15.0


@dataclass
class WatchVerification:
    """Notes in `freshness` what the watches must deliver, and what the API server says of it. `clock`: in seconds."""

    client: ClusterClient
    freshness: WatchFreshness
    clock: Callable[[], float]

    def expect(self, kind: Kind, manifest: dict[str, Any]) -> None:
        """The index has this newer state, so a watch delivers it."""
        if kind not in WATCHED:
            return
        metadata = manifest["metadata"]
        version = int(metadata["resourceVersion"])
        self.freshness.expect(kind, metadata["namespace"], metadata["name"], version, self.clock())

    async def verify(self) -> None:
        """Read overdue canaries once more: objects whose state no watch has delivered."""
        for canary in self.freshness.overdue(self.clock()):
            try:
                live = await self.client.get(canary.kind, canary.namespace, canary.name)
            except (ApiError, ApiUnreachable):
                self.freshness.excuse(canary, self.clock())
            else:
                version = None if live is None else int(live["metadata"]["resourceVersion"])
                self.freshness.verify(canary, version)

    async def verify_forever(self) -> None:
        while True:
            await asyncio.sleep(VERIFY_WATCHES_SECONDS)
            await self.verify()
