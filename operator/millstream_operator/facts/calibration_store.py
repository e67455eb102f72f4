"""Keep corrections in a ConfigMap of the operator's namespace: read when leadership begins, written when one changes.

    LLMDeployment that answered, its measurement ─▶ record ─▶ ConfigMap, only beyond a threshold ─▶ later plans

A steady state writes nothing: of two measurements for one key that of the newer pod stays, in whichever order and
however often they come, so deployments with one key never write in turns. A write that fails is tried again later and
delays no reconcile: calibration improves plans and is never needed for one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from millstream_operator.catalog.gpu import GpuCatalog, GpuPart
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.facts.calibration_record import Entry, config_map, read_entries
from millstream_operator.kube.client import NO_VERSION, ApiError, ApiUnreachable, ClusterClient
from millstream_operator.kube.kinds import CONFIG_MAP
from millstream_operator.planning.calibration import (
    NO_CORRECTION,
    Calibration,
    CalibrationKey,
    differs,
    model_key,
    with_measurement,
)
from millstream_operator.planning.measurement import Measurement, PodMeasurement, is_measurable, measurement
from millstream_operator.rendering.revision import Revision

log = logging.getLogger(__name__)

WRITE_THRESHOLD_PERCENT = 5  # a correction that moved by less is not written
RELOAD_SECONDS = 300.0
RETRY_SECONDS = 300.0  # after a write that failed
MAX_REMEMBERED = 4096  # measurements that were recorded already


class CalibrationStore:
    """For use within one event loop. `use` gets all corrections when they changed; `catalog` gives today's GPUs."""

    def __init__(
        self,
        client: ClusterClient,
        namespace: str,
        name: str,
        *,
        use: Callable[[Calibration], None],
        catalog: Callable[[], GpuCatalog],
        clock: Callable[[], float],
    ) -> None:
        self._client, self._namespace, self._name = client, namespace, name
        self._use, self._catalog, self._clock = use, catalog, clock
        self._entries: dict[CalibrationKey, Entry] = {}
        self._version: str | None = None  # None: not read yet
        self._confirmed: dict[CalibrationKey, int] = {}  # when the newest pod was created that changed nothing
        self._seen: dict[str, object] = {}  # by uid: the measurement that was recorded last
        self._warned: dict[tuple[str, str], None] = {}  # by pod: what is ignored was logged
        self._not_before = float("-inf")

    async def load_forever(self) -> None:
        """Read it again now and then: a person may delete the ConfigMap, to forget what was measured."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
            await self.load()

    async def load(self) -> bool:
        """Read the ConfigMap. Return whether that worked; where it did not, what is known stays."""
        try:
            stored = await self._client.get(CONFIG_MAP, self._namespace, self._name)
        except (ApiError, ApiUnreachable) as error:
            log.warning("calibration: %s/%s cannot be read: %s", self._namespace, self._name, error)
            return False
        before = self._entries
        self._read(stored)
        if self._entries != before:  # another leader wrote, or a person: what runs is recorded again
            self._seen.clear()
        return True

    def compare(self, revision: Revision, shape: ModelShape, measured: PodMeasurement) -> Measurement | None:
        """Return what is predicted beside what was measured; None where the formulas do not describe this plan."""
        part = self._part(revision)
        if part is None or not is_measurable(revision.plan):
            return None
        return measurement(revision.plan, shape, part, measured)

    async def record(
        self, uid: str, revision: Revision, shape: ModelShape, measured: PodMeasurement, compared: Measurement
    ) -> None:
        """Take over what a pod has measured, if none newer did; write it if a correction changed enough."""
        seen, part = (revision.name, measured), self._part(revision)
        if part is None or self._seen.get(uid) == seen or self._clock() < self._not_before:
            return
        if self._version is None and not await self.load():
            self._not_before = self._clock() + RETRY_SECONDS
            return
        plan = revision.plan
        key = CalibrationKey(
            revision.image, model_key(shape), plan["quantization"], part.name, plan["tensorParallelSize"]
        )
        known = self._entries.get(key)
        before = known.correction if known is not None else NO_CORRECTION
        if known is not None and max(known.at_seconds, self._confirmed.get(key, 0)) > measured.at_seconds:
            self._remember(uid, seen)
            return
        correction, ignored = with_measurement(before, compared.predicted, compared.measured, compared.batch_sequences)
        for why in ignored:
            self._warn(measured.pod, f"{revision.name} on {part.name} TP{key.tensor}", why)
        entry = Entry(key, correction, at_seconds=measured.at_seconds)
        if not differs(before, correction, WRITE_THRESHOLD_PERCENT):
            self._confirmed[key] = measured.at_seconds
            self._remember(uid, seen)
        elif await self._write(entry):
            self._remember(uid, seen)

    def _part(self, revision: Revision) -> GpuPart | None:
        return self._catalog().get(revision.plan.get("accelerator") or "")

    def _warn(self, pod: str, where: str, why: str) -> None:
        """Log what is ignored of a pod, once."""
        if (pod, why) in self._warned:
            return
        while len(self._warned) >= MAX_REMEMBERED:
            del self._warned[next(iter(self._warned))]
        self._warned[pod, why] = None
        log.warning("calibration of %s does not keep what pod %s measured: %s", where, pod, why)

    def forget(self, uid: str) -> None:
        self._seen.pop(uid, None)

    def _remember(self, uid: str, seen: object) -> None:
        while len(self._seen) >= MAX_REMEMBERED:
            del self._seen[next(iter(self._seen))]
        self._seen[uid] = seen

    async def _write(self, entry: Entry) -> bool:
        """Return whether it was written. After a conflict the other version is read, and a later turn tries again."""
        number = max((one.number for one in self._entries.values()), default=0) + 1
        key, correction = entry.key, entry.correction
        entries = {**self._entries, key: replace(entry, number=number)}
        version = self._version or NO_VERSION
        try:
            self._read(await self._client.apply(config_map(self._namespace, self._name, entries, version)))
        except (ApiError, ApiUnreachable) as error:
            if isinstance(error, ApiError) and error.status == 409:
                await self.load()
                return False
            self._version = None  # read again before the next write: it may have been deleted
            self._not_before = self._clock() + RETRY_SECONDS
            log.warning("calibration: %s/%s cannot be written: %s", self._namespace, self._name, error)
            return False
        log.info("calibration: %s TP%d with %s: %s", key.accelerator, key.tensor, key.image, correction.as_dict())
        return True

    def _read(self, stored: Mapping[str, Any] | None) -> None:
        self._entries = read_entries(stored)
        self._version = stored["metadata"]["resourceVersion"] if stored is not None else ""
        self._confirmed = {key: at for key, at in self._confirmed.items() if key in self._entries}
        self._use(Calibration(tuple((key, one.correction) for key, one in self._entries.items())))
