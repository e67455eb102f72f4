"""One JSON object of a model folder, read field by field: each failure is one sentence naming file, field and value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.strict_json import read_strict_json

INTEGER_LIMIT = 1 << 31  # larger than any size of any model, small enough that no arithmetic on it surprises


class Fields:
    """Typed reads of `config.json` or of an object within it. `null` reads as absent unless said otherwise."""

    def __init__(self, path: Path, values: dict[str, Any] | None = None, prefix: str = "") -> None:
        """`prefix`: where `values` lies in the file, for messages, e.g. `rope_parameters.`."""
        self.path = path
        self._prefix = prefix
        self._values = values if values is not None else _read_json_object(path)

    def __contains__(self, name: str) -> bool:
        """Whether the file has the field, `null` included."""
        return name in self._values

    @property
    def values(self) -> Mapping[str, Any]:
        """All fields as the file has them."""
        return self._values

    def get(self, name: str, default: object = None) -> Any:
        return self._values.get(name, default)

    def integer(self, name: str, default: int | None = None, *, maximum: int = INTEGER_LIMIT) -> int:
        """A positive integer."""
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
            limit = f" of at most {maximum}" if isinstance(value, int) and value > maximum else ""
            raise self.invalid(name, f"{value!r}; it must be a positive integer{limit}")
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """A positive integer, or None where the file says `null`; `default` where it says nothing."""
        if self._values.get(name) is not None:
            return self.integer(name)
        return None if name in self._values else default

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.invalid(name, f"{value!r}; it must be a positive number")
        return float(value)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A positive number, or None where the file says `null`; `default` where it says nothing."""
        if self._values.get(name) is not None:
            return self.number(name)
        return None if name in self._values else default

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers."""
        value = self._values.get(name)
        if (
            not isinstance(value, list)
            or len(value) != length
            or not all(isinstance(one, int | float) and not isinstance(one, bool) and 0 < one < 1e30 for one in value)
        ):
            raise self.invalid(name, f"{_short(value)}; it must be a list of {length} positive numbers")
        return tuple(float(one) for one in value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.invalid(name, f"{value!r}; it must be true or false")
        return value

    def section(self, name: str) -> Fields | None:
        """The fields of an object within this one; None where it is absent or empty."""
        value = self._values.get(name)
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise self.invalid(name, f"{_short(value)}; it must be an object")
        return Fields(self.path, value, prefix=f"{self._prefix}{name}.") if value else None

    def invalid(self, name: str, what: str) -> RuntimeFailure:
        return RuntimeFailure(FailureReason.CHECKPOINT_INVALID, f"{self.path}: {self._prefix}{name} is {what}.")

    def unsupported(self, name: str, value: object, supported: str) -> RuntimeFailure:
        return RuntimeFailure(
            FailureReason.UNSUPPORTED_BY_RUNTIME,
            f"{self.path}: {name} {value!r} is not supported by this runtime; supported: {supported}.",
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        values = read_strict_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RuntimeFailure(
            FailureReason.CHECKPOINT_INVALID,
            f"{path} does not exist; a model folder needs it next to its *.safetensors.",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RuntimeFailure(FailureReason.CHECKPOINT_INVALID, f"{path} is not readable JSON: {error}.") from error
    if not isinstance(values, dict):
        raise RuntimeFailure(FailureReason.CHECKPOINT_INVALID, f"{path} must hold a JSON object.")
    return values
