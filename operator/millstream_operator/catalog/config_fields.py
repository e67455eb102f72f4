"""Read numbers from an untrusted config.json: typed, bounded, with an error that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LIMIT = 1 << 32  # no dimension of a model is near it, and products of a few stay exact


class ConfigError(ValueError):
    """A config.json that no shape can be read from. `str()` is one sentence."""


class ConfigFields:
    """Reads fields of one config.json; `source` is what errors call it."""

    def __init__(self, values: Mapping[str, Any], source: str = "config.json") -> None:
        self.values, self.source = values, source

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number from `minimum` on; null counts as absent, as in `transformers`."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.source}: {name} is missing; it must be a whole number.")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= LIMIT:
            raise ConfigError(f"{self.source}: {name} is {value!r}; it must be a whole number from {minimum}.")
        return value

    def optional(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.integer(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)

    def text(self, name: str, default: str = "") -> str:
        value = self.values.get(name)
        return value if isinstance(value, str) else default

    def integers(self, name: str) -> frozenset[int]:
        value = self.values.get(name)
        return frozenset(item for item in value if isinstance(item, int)) if isinstance(value, list) else frozenset()
