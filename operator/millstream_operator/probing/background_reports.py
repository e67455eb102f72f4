"""All that asks pods in the background, for the process that runs it: as they load, as they draft, as they make."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.pod_access import PodAccess
from millstream_operator.probing.drafting_reports import DraftingReports
from millstream_operator.probing.pod_reports import PodReports
from millstream_operator.probing.step_reports import StepReports


class BackgroundReports:
    """For use within one event loop; see its parts."""

    def __init__(self, access: PodAccess, on_change: Callable[[OwnerKey], None], clock: Callable[[], float]) -> None:
        self.pods = PodReports(access, on_change, clock)
        self.drafting = DraftingReports(access, on_change, clock)
        self.steps = StepReports(access, on_change, clock)

    async def run(self) -> None:
        """Ask pods when they are due, until cancelled; the first error ends all."""
        async with asyncio.TaskGroup() as group:
            for one in (self.pods, self.drafting, self.steps):
                group.create_task(one.run(), name=type(one).__name__)

    def clear(self) -> None:
        """Ask no pods: another replica leads."""
        for one in (self.pods, self.drafting, self.steps):
            one.clear()
