"""Read a model's config.json as JSON that means one thing; imports nothing of the package.

Python's `json` takes more than the standard: `NaN` and `Infinity`, which no size and no frequency can be; `1e999`,
which becomes infinite; a key that is given twice, of which the last wins. Each is refused with the field's name. A key
that is given twice with one value is no contradiction, and accepted.
"""

from __future__ import annotations

import json
import math
from typing import Any

CURE = "correct it"  # in the file that the caller names
MAX_DEPTH = 100  # of lists and objects; how many Python itself takes depends on what else the process has imported
MAX_DIGITS = 308  # any such integer fits into a float; Python itself refuses 4300, in its own words


def read_strict_json(text: str | bytes) -> Any:
    """Return the value.

    Raises:
        ValueError: no JSON in UTF-8, a number that is not finite or too long, a key with two values, or deep nesting.
    """
    try:
        value = json.loads(
            text if isinstance(text, str) else text.decode(), object_pairs_hook=_object, parse_int=_integer
        )
        field = _not_finite(value)
    except RecursionError:
        raise ValueError(f"its lists or objects are nested too deeply; {CURE}") from None
    if field is not None:
        path, number = field
        raise ValueError(f"{path or 'the value'} is {number}, which is no number of JSON; {CURE}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found and repr(found[name]) != repr(value):
            raise ValueError(f"{name} is given twice, as {_shortened(found[name])} and as {_shortened(value)}; {CURE}")
        found[name] = value
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits; {CURE}")
    return int(digits)


def _not_finite(value: Any, path: str = "", depth: int = 0) -> tuple[str, float] | None:
    """Return the first number that is not finite, with its path. Raises RecursionError: `value` is nested deeply."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, float):
        return None if math.isfinite(value) else (path, value)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = (_not_finite(one, f"{path}.{name}" if path else str(name), depth + 1) for name, one in items)
    return next((one for one in found if one is not None), None)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
