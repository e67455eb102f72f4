"""One rule across fields, in CEL and in Python. `api/rules.py` has them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.base import QUALIFIED_NAME_PARTS_PATTERN, QUALIFIED_NAME_PATTERN, is_qualified_name


@dataclass(frozen=True, slots=True)
class Rule:
    """`path`: schema path of `self`, `[]` for the items of a list; empty for the whole object."""

    path: str
    cel: str
    holds: Callable[[Any], bool]
    message: str


def qualified_keys(path: str) -> Rule:
    return Rule(
        path,
        f"self.all(key, key.matches('{QUALIFIED_NAME_PATTERN}') && key.matches('{QUALIFIED_NAME_PARTS_PATTERN}'))",
        lambda value: all(map(is_qualified_name, value)),
        "each key must be a name of at most 63 characters such as team, or with a DNS prefix of at most 253 such as "
        "example.com/team.",
    )
