"""Read values from an untrusted config.json: typed, within their range, with an error that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream_operator.catalog.config_ranges import RANGES

CURE = "Correct it, or give the model's own config.json (model.configMapRef; millstream plan --config FILE)."

LARGEST_DECIMAL = 1e30  # above every frequency and factor; below it no arithmetic overflows


class ConfigError(ValueError):
    """A config.json that no shape can be read from. `str()` is one line: what is wrong, where, what to do."""


class UnsupportedModelError(ConfigError):
    """A valid config.json of a model that this version does not know: its family, or the format of its weights."""


class ConfigFields:
    """Reads fields of one config.json. `source` is what errors call it, `prefix` the path of nested fields."""

    def __init__(self, values: Mapping[str, Any], source: str = "config.json", prefix: str = "") -> None:
        self.values, self.source, self.prefix = values, source, prefix

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number within its range; null counts as absent, as in `transformers`.

        Raises:
            ConfigError: another value, or none where there is no default.
        """
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"{self._where(name)} is missing; it must be {RANGES[name]}. {CURE}")
            return default
        return self.checked(name, value)

    def checked(self, name: str, value: object) -> int:
        """Return `value` of the field `name`, or of an item of it. Raises ConfigError: it is out of range."""
        if isinstance(value, int) and value in RANGES[name]:
            return value
        raise ConfigError(f"{self._where(name)} is {_shortened(value)}; it must be {RANGES[name]}. {CURE}")

    def optional(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.integer(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false; null counts as absent. Raises ConfigError: another value."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self._where(name)} is {_shortened(value)}; it must be true or false. {CURE}")
        return value

    def text(self, name: str, default: str = "") -> str:
        """A word; null counts as absent. Raises ConfigError: another value."""
        value = self.values.get(name)
        if value is None or isinstance(value, str):
            return default if value is None else value
        raise ConfigError(f"{self._where(name)} is {_shortened(value)}; it must be a word in quotes. {CURE}")

    def integers(self, name: str) -> frozenset[int]:
        """A list of whole numbers within their range; null counts as absent. Raises ConfigError: another value."""
        value = self.values.get(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list):
            raise ConfigError(
                f"{self._where(name)} is {_shortened(value)}; it must be a list, each item {RANGES[name]}. {CURE}"
            )
        return frozenset(self.checked(name, item) for item in value)

    def decimal(self, name: str) -> None:
        """Check a positive, finite number; null counts as absent. Raises ConfigError: another value."""
        value = self.values.get(name)
        if value is None or (type(value) in (int, float) and 0 < value < LARGEST_DECIMAL):
            return
        raise ConfigError(f"{self._where(name)} is {_shortened(value)}; it must be a number above 0. {CURE}")

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """An object; null counts as absent. Raises ConfigError: another value."""
        value = self.values.get(name)
        if value is None or isinstance(value, Mapping):
            return value
        raise ConfigError(f"{self._where(name)} is {_shortened(value)}; it must be an object. {CURE}")

    def contradiction(self, what: str) -> ConfigError:
        """Return the error for values that cannot belong to one model. `what` names the fields and their values."""
        return ConfigError(f"{self.source}: {what}. {CURE}")

    def _where(self, name: str) -> str:
        return f"{self.source}: {self.prefix}{name}"


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
