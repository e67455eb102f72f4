"""The probe's key of each model, from the ring that the operator holds now."""

from __future__ import annotations

from collections.abc import Callable

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.probing.probe_key import ProbeKey
from millstream_operator.rendering.probe_key_ring import ProbeKeyRing


class DerivedKeys:
    """`ring` is asked before each probe, so that a rotated key is used at once."""

    def __init__(self, ring: Callable[[], ProbeKeyRing]) -> None:
        self._ring = ring

    async def of(self, owner: LLMDeployment) -> ProbeKey:
        return ProbeKey(self._ring().key(owner))
