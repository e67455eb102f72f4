"""Bounded reads of a model folder's JSON files; each failure is one sentence with the file and the fix.

absent                                     None
a folder, unreadable, empty, too large     RuntimeFailure
not UTF-8, no JSON, no object              RuntimeFailure
a key with two values                      the last one counts, as in `transformers`; it is in `repeated`
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_runtime.errors import FailureReason, RuntimeFailure

SETTINGS_LIMIT_BYTES = 16 << 20  # of every file but tokenizer.json; the largest published ones have about two
TOKENIZER_LIMIT_BYTES = 256 << 20  # the largest published tokenizer.json has about a tenth of this
MAX_REPEATED_KEYS = 16  # that are named


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A JSON object. `repeated`: its keys that are given twice with two values, inner ones included."""

    name: str
    values: Mapping[str, Any]
    repeated: tuple[str, ...] = ()


def read_json_file(path: Path) -> JsonFile | None:
    """Read a JSON object; None where the file is absent.

    Raises:
        RuntimeFailure: CheckpointInvalid, the file cannot be used.
    """
    content = read_bytes(path, SETTINGS_LIMIT_BYTES)
    return None if content is None else parse_json(path, content)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} where the file is absent. Raises RuntimeFailure: as `read_json_file`."""
    file = read_json_file(path)
    return {} if file is None else dict(file.values)


def read_bytes(path: Path, limit_bytes: int) -> bytes | None:
    """Read a whole file; None where it is absent.

    Raises:
        RuntimeFailure: CheckpointInvalid, it is no file, or unreadable, empty or larger than the limit.
    """
    if not path.exists():
        if path.is_symlink():
            raise invalid(f"{path} is a link to a file that does not exist; fetch the model again.")
        return None
    if not path.is_file():
        raise invalid(f"{path} is not a file; put the model's {path.name} there, or remove it.")
    try:
        with path.open("rb") as file:
            content = file.read(limit_bytes + 1)
    except OSError as error:
        raise invalid(f"{path} cannot be read: {error.strerror}.") from error
    if len(content) > limit_bytes:
        raise invalid(f"{path} is larger than {limit_bytes >> 20} MiB, the most that is read of such a file.")
    if not content.strip():
        raise invalid(f"{path} is empty, and so is not readable JSON; fetch it again, or remove it.")
    return content


def parse_json(path: Path, content: bytes) -> JsonFile:
    """Parse a JSON object in UTF-8.

    Raises:
        RuntimeFailure: CheckpointInvalid, it is none.
    """
    repeated: list[str] = []

    def whole(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            repeated.extend(_repeated(pairs))
        return values

    try:
        values = json.loads(content.decode(), object_pairs_hook=whole)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{path} is not readable JSON: {first_line(error)}.") from error
    if not isinstance(values, dict):
        raise invalid(f"{path} must hold a JSON object.")
    return JsonFile(path.name, values, tuple(dict.fromkeys(repeated))[:MAX_REPEATED_KEYS])


def invalid(message: str) -> RuntimeFailure:
    """The failure of a folder that cannot be served."""
    return RuntimeFailure(FailureReason.CHECKPOINT_INVALID, message)


def first_line(error: Exception) -> str:
    """The first line of an error's text, without the full stop at its end."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")[:300]


def _repeated(pairs: list[tuple[str, Any]]) -> Iterator[str]:
    """Keys with two different values."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if repr(values.setdefault(key, value)) != repr(value):
            yield key[:80]
