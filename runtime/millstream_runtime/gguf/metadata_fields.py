"""Typed reads of a GGUF file's metadata, each failure one sentence with file, field and value."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.gguf.header import invalid_gguf

INTEGER_LIMIT = 1 << 31


class MetadataFields:
    """`prefix`: of the architecture's own fields, such as `llama.`."""

    def __init__(self, metadata: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._metadata = metadata
        self._where = where
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return f"{self._prefix}{name}" in self._metadata

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Also of a list of equal numbers, one for each layer."""
        value = self._metadata.get(f"{self._prefix}{name}", default)
        if isinstance(value, list) and value and len(set(map(str, value))) == 1:
            value = value[0]
        if type(value) is not int or not least <= value < INTEGER_LIMIT:
            raise self.wrong(name, value, f"a whole number from {least} on, the same for all layers")
        return value

    def decimal(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._metadata.get(f"{self._prefix}{name}", default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(name, value, "a positive number")
        return float(value)

    def any_number(self, name: str) -> float:
        """A number that may be 0 or negative."""
        value = self._metadata.get(f"{self._prefix}{name}")
        if not isinstance(value, int | float) or isinstance(value, bool) or not -math.inf < value < math.inf:
            raise self.wrong(name, value, "a number")
        return float(value)

    def refuse_unknown(self, start: str, known: Collection[str]) -> None:
        """Refuse a field whose name begins so and that is not `known`: it could change every answer.

        Raises:
            RuntimeFailure: UnsupportedByRuntime, naming the field.
        """
        for name in self._metadata:
            plain = name.removeprefix(self._prefix)
            if name.startswith(f"{self._prefix}{start}") and plain not in known:
                raise self.unsupported(
                    plain[:120], self._metadata[name], f"files without it, or with {', '.join(known)}"
                )

    def is_zero(self, name: str) -> bool:
        value = self._metadata.get(f"{self._prefix}{name}")
        return isinstance(value, int | float) and not isinstance(value, bool) and value == 0

    def flag(self, name: str, default: bool) -> bool:
        value = self._metadata.get(f"{self._prefix}{name}", default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def word(self, name: str, default: str = "") -> str:
        value = self._metadata.get(f"{self._prefix}{name}", default)
        if not isinstance(value, str):
            raise self.wrong(name, value, "a text")
        return value

    def items(self, name: str, kind: type, length: int | None = None) -> list[Any]:
        """A list of values of one type; `length`: how many there must be."""
        value = self._metadata.get(f"{self._prefix}{name}", [])
        if not isinstance(value, list) or not all(type(one) is kind for one in value):
            raise self.wrong(name, value, f"a list of {kind.__name__}")
        if length is not None and len(value) != length:
            raise self.wrong(name, f"a list of {len(value)}", f"one of {length}")
        return value

    def wrong(self, name: str, value: object, expected: str) -> RuntimeFailure:
        found = "missing" if value is None else f"{value!r:.60}"
        return invalid_gguf(self._where, f"has field {self._prefix}{name} {found}; it must be {expected}")

    def unsupported(self, name: str, value: object, supported: str) -> RuntimeFailure:
        return RuntimeFailure(
            FailureReason.UNSUPPORTED_BY_RUNTIME,
            f"{self._where}: {self._prefix}{name} {value!r:.60} is not supported by this runtime; supported: "
            f"{supported}.",
        )
