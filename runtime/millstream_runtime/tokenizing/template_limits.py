"""Limits on what a chat template may compute: time, the size of one value, and the bytes of all values of a render.

A template is a program of the model folder. Every operation that could make something large asks here first, and every
loop, call and filter looks at the clock (`template_environment`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import jinja2.utils

MAX_RENDER_SECONDS = 30.0  # a server waits no longer, and its thread is needed for other chats
MAX_TEXT_CHARACTERS = 16 << 20  # of one text; what is rendered is one
MAX_ITEMS = 1 << 20  # of one list, and of what lies in it
MAX_INTEGER_BITS = 8192  # Python writes no longer ones as text
MAX_WALKED = 1 << 18  # what lies in a value that is compared or written, counted as often as it does
# Bytes of everything that one render makes, whether or not it is kept.
MAX_PRODUCED_BYTES = 256 << 20
MAX_COMPARISONS = 1 << 30  # of characters or items, within one operation that cannot be stopped
MAX_SLOW_CHARACTERS = 64 << 10  # of a text for what takes a time quadratic in it
NUMBER_CHARACTERS = 330  # of the longest float; integers are written digit by digit up to MAX_INTEGER_BITS
REPR_SLAB_CHARACTERS = 64 << 10
SEQUENCES = (list, tuple)
CONTAINERS = (list, tuple, dict)
_VIEWS = (KeysView, ValuesView, ItemsView)


class TemplateLimitExceeded(Exception):
    """A template asked for more than a limit allows; `str()` is fit for the client."""


class TemplateTimeExceeded(Exception):
    """A template has not ended in its time."""


class RenderBudget:
    """What one render may still take."""

    def __init__(self, seconds: float | None = None) -> None:
        self._deadline_seconds = time.monotonic() + (MAX_RENDER_SECONDS if seconds is None else seconds)
        self._produced_bytes = 0

    def check_time(self) -> None:
        """Raises TemplateTimeExceeded."""
        if time.monotonic() > self._deadline_seconds:
            raise TemplateTimeExceeded

    def require_bytes(self, num_bytes: int) -> None:
        """Raise TemplateLimitExceeded if an operation that makes `num_bytes` would be too much for this render."""
        require("bytes made in one render", self._produced_bytes + num_bytes, MAX_PRODUCED_BYTES)

    def charge(self, num_bytes: int) -> None:
        """Count what was made, or is about to be."""
        self.require_bytes(num_bytes)
        self._produced_bytes += num_bytes

    def charge_value(self, value: Any) -> None:
        """Count a value that was made, without what lies in it."""
        if isinstance(value, str | bytes | list | tuple | dict | set):
            self.charge(sys.getsizeof(value))


class Renders(threading.local):
    """The budget of the render that runs in this thread."""

    def __init__(self) -> None:
        self.budget = RenderBudget()


def require(what: str, value: int, most: int) -> None:
    """Raise TemplateLimitExceeded: `value` is above `most`."""
    if value > most:
        written = f"{value:,}" if value.bit_length() <= 64 else f"a number of {value.bit_length()} bits"
        raise TemplateLimitExceeded(
            f"The model's chat template asks for too much: {what}: {written}, and at most {most:,} are allowed. "
            "Shorten the messages, or correct chat_template.jinja of the model."
        )


def require_text(characters: int) -> None:
    require("characters in one text", characters, MAX_TEXT_CHARACTERS)


def require_items(items: int) -> None:
    require("items in one list", items, MAX_ITEMS)


def require_comparable(value: Any) -> None:
    """Raise TemplateLimitExceeded: what lies in this container, counted as often as it does, is too much to compare.

    A list that holds one list twice, which holds another twice, and so on, is small; Python walks all of its paths.
    """
    if isinstance(value, CONTAINERS):
        for _ in _walk(value):
            pass


def text_characters(value: Any) -> int:
    """An upper bound on the characters of `str(value)`, at no cost in memory.

    Raises:
        TemplateLimitExceeded: there are more than one text may have.
    """
    if isinstance(value, str):
        return len(value)
    characters = 0
    for part in _walk(value):
        characters += _own_characters(part)
        require_text(characters)
    return characters


def _own_characters(value: Any) -> int:
    """Of the representation of `value`, without what lies in it, with a comma and a space."""
    if isinstance(value, str):
        starts = range(0, len(value), REPR_SLAB_CHARACTERS)
        return 2 + sum(len(repr(value[start : start + REPR_SLAB_CHARACTERS])) for start in starts)
    if isinstance(value, bytes | bytearray):
        return 5 + 4 * len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 4
    return NUMBER_CHARACTERS if isinstance(value, float) else 128


def _walk(value: Any) -> Iterator[Any]:
    """`value` and what lies in it, as often as it does. Ends by its limit if it lies in itself."""
    left, seen = [value], 0
    while left:
        one = left.pop()
        seen += 1
        yield one
        inner = _inner(one)
        require("values in one another", seen + len(left) + len(inner), MAX_WALKED)
        left.extend(inner)


def _inner(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, jinja2.utils.Namespace):
        attributes = object.__getattribute__(value, "_Namespace__attrs")
        return [*attributes.keys(), *attributes.values()]
    if isinstance(value, (*SEQUENCES, set, *_VIEWS)):
        return list(value)
    return []
