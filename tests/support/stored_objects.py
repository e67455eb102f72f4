"""What the API server says of a new object and of an edit of a stored one, by the rules for what is new."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from millstream_operator.api.validation.allowed import NOTHING, Allowed
from millstream_operator.api.validation.ratchets import ratchets
from tests.support.cel import evaluate, evaluate_ratchet

Manifest = dict[str, Any]


def edited(old: Manifest, change: Callable[[Manifest], object]) -> Manifest:
    """A copy of `old` whose spec is changed."""
    new = copy.deepcopy(old)
    change(new["spec"])
    return new


def refused_by_cel(new: Manifest, old: Manifest | None = None, allowed: Allowed = NOTHING) -> list[str]:
    """The messages of the rules that `new` breaks. `old`: what is stored; None where the object is new."""
    messages = []
    for ratchet in ratchets(allowed):
        if ratchet.cel is None:
            continue
        before = dict(_at(old, ratchet.path)) if old is not None else {}
        for key, value in _at(new, ratchet.path):
            given = [value, *([before[key]] if key in before else [])]
            if not evaluate_ratchet(ratchet.cel, *given):
                own = ratchet.message_cel
                messages.append(ratchet.message if own is None else evaluate(own, value))  # it has no `oldSelf`
    return messages


def _at(stored: Manifest, path: str) -> list[tuple[str, Any]]:
    """The values at a schema path, each with what the API server finds the old one by."""
    found: list[tuple[str, Any]] = [("", stored)]
    for step in path.split("."):
        below = [(key, value[step.removesuffix("[]")]) for key, value in found if step.removesuffix("[]") in value]
        if step.endswith("[]"):  # a list-map: items of one name are the same item
            below = [(f"{key}/{item['name']}", item) for key, items in below for item in items]
        found = below
    return found
