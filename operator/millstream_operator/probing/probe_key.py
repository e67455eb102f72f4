"""The API key that the operator sends with its probe of a model that asks for one. Its value is never printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from millstream_operator.api.llmdeployment import LLMDeployment


@dataclass(frozen=True, slots=True)
class ProbeKey:
    """`value` None: the model needs no key."""

    value: str | None = field(default=None, repr=False)

    def headers(self) -> Mapping[str, str]:
        """The header that carries the key; none where there is no key."""
        return {} if self.value is None else {"Authorization": f"Bearer {self.value}"}


NO_KEY = ProbeKey()


class ProbeKeys(Protocol):
    """Where the probe's keys come from. Asked before each probe, so that a rotated key is used at once."""

    async def of(self, owner: LLMDeployment) -> ProbeKey:
        """Return the key for this model. Raises ApiError, ApiUnreachable."""
        ...


class NoKeys:
    """No model asks for a key."""

    async def of(self, owner: LLMDeployment) -> ProbeKey:
        return NO_KEY
