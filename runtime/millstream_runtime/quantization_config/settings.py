"""Typed reads of a `quantization_config`, each failure one sentence with file, field and value. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream_runtime.errors import FailureReason, RuntimeFailure

GROUP_SIZE_LIMIT = 1 << 20
DEFAULT_GROUP_SIZE = 128
MAX_SECTIONS = 256
COUNT_LIMIT = 1 << 62


class UnsupportedFormatError(RuntimeFailure):
    """UnsupportedByRuntime. `what`: the field and its value."""

    def __init__(self, message: str, what: str) -> None:
        super().__init__(FailureReason.UNSUPPORTED_BY_RUNTIME, message)
        self.what = what


class Settings:
    """Fields of one JSON object; `prefix` says where it lies, for messages. `null` reads as absent."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str) -> None:
        self._values = values
        self._source = source
        self._prefix = prefix

    def given(self, *names: str) -> Any:
        """The first of `names` that is not absent; None where all are."""
        return next((self._values[name] for name in names if self._values.get(name) is not None), None)

    def text(self, name: str) -> str:
        """In lower case; empty where absent."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.invalid(name, f"{_short(value)}; it must be a string")
        return (value or "").lower()

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.invalid(name, f"{_short(value)}; it must be true or false")
        return default if value is None else value

    def number(self, name: str, *, default: float) -> float:
        """A number of at least 0."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise self.invalid(name, f"{_short(value)}; it must be a number of at least 0")
        return float(value)

    def one_of(self, names: Sequence[str], supported: Sequence[int], default: int | None = None) -> int:
        """An integer under one of several spellings."""
        name = next((one for one in names if self._values.get(one) is not None), names[0])
        value = self._values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.invalid(name, f"{_short(value)}; it must be one of {', '.join(map(str, supported))}")
        if value not in supported:
            raise self.unsupported(name, value, ", ".join(map(str, supported)))
        return value

    def group_size(self) -> int | None:
        """Weights along the input dimension that share a scale; None (-1 in the file): all of a column."""
        name = "group_size" if self._values.get("group_size") is not None else "q_group_size"
        value = self._values.get(name)
        value = DEFAULT_GROUP_SIZE if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or 1 <= value <= GROUP_SIZE_LIMIT):
            raise self.invalid(name, f"{_short(value)}; it must be -1 (one group per column) or a positive integer")
        return None if value == -1 else value

    def block(self, name: str) -> tuple[int, int] | None:
        """Rows and columns of a block that has one scale; None where absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(map(_is_block_size, value)):
            raise self.invalid(name, f"{_short(value)}; it must be rows and columns of a block, each above 1")
        return value[0], value[1]

    def section(self, name: str) -> Settings | None:
        """An object within this one; None where it is absent or empty."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.invalid(name, f"{_short(value)}; it must be an object")
        return Settings(value, self._source, f"{self._prefix}{name}.") if value else None

    def sections(self, name: str) -> list[Settings]:
        """The objects of an object of objects."""
        outer = self.section(name)
        if outer is None:
            return []
        if len(outer._values) > MAX_SECTIONS:
            raise self.invalid(name, f"an object of {len(outer._values)} fields; at most {MAX_SECTIONS} are read")
        found = [outer.section(str(one)) for one in outer._values]
        return [one for one in found if one is not None]

    def words(self, name: str, known: Sequence[str]) -> dict[str, str]:
        """An object of texts, each one of `known`; empty where it is absent."""
        section = self.section(name)
        found = {} if section is None else dict(section._values)
        for key, value in found.items():
            if value not in known:
                raise self.unsupported(f"{name}.{str(key)[:60]}", value, ", ".join(known))
        return found

    def counts(self, name: str, known: Sequence[str]) -> dict[str, int]:
        """An object of positive numbers, its fields among `known`; empty where it is absent."""
        section = self.section(name)
        found = {} if section is None else dict(section._values)
        for key, value in found.items():
            if key not in known:
                raise self.unsupported(name, key, ", ".join(known))
            if type(value) is not int or not 0 < value < COUNT_LIMIT:
                raise self.invalid(f"{name}.{key}", f"{_short(value)}; it must be a positive integer")
        return found

    def names(self, *fields: str) -> tuple[str, ...]:
        """The modules that lists name, nested lists included; or the keys of `{name: how often}`."""
        found: list[str] = []
        for field in fields:
            value = self._values.get(field)
            for one in [] if value is None else _flat(value):
                if not isinstance(one, str):
                    raise self.invalid(field, f"{_short(value)}; it must be a list of names of modules")
                found.append(one)
        return tuple(found)

    def invalid(self, name: str, what: str) -> RuntimeFailure:
        return RuntimeFailure(FailureReason.CHECKPOINT_INVALID, f"{self._source}: {self._prefix}{name} is {what}.")

    def unsupported(self, name: str, value: object, supported: str) -> UnsupportedFormatError:
        what = f"{self._prefix}{name} {_short(value)}"
        return UnsupportedFormatError(
            f"{self._source}: {what} is not supported by this runtime; supported: {supported}.", what
        )


def _is_block_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 < value <= GROUP_SIZE_LIMIT


def _flat(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return [*value]
    if isinstance(value, list):
        return [inner for one in value for inner in ([*one] if isinstance(one, list | Mapping) else [one])]
    return [value]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
