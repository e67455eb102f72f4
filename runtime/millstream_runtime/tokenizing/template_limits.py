"""Limits on what a chat template may compute: time, the size of one value, and the bytes of all values of a render.

A template is a program of the model folder. Every operation that could make something large asks here first, and every
loop, call and filter looks at the clock (`template_environment`).
"""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any, NoReturn

import jinja2.utils

MAX_RENDER_SECONDS = 30.0  # a server waits no longer, and its thread is needed for other chats
MAX_TEXT_CHARACTERS = 16 << 20  # of one text; what is rendered is one
MAX_ITEMS = 1 << 20  # of one list, and of what lies in it
MAX_INTEGER_BITS = 8192  # Python writes no longer ones as text
MAX_WALKED = 1 << 18  # what lies in a value that is compared or written, counted as often as it does
# Bytes of everything that one render makes, whether or not it is kept.
MAX_PRODUCED_BYTES = 256 << 20
MAX_NESTED_LEVELS = 256  # of values in one another; Python hashes and compares them by recursion
MAX_COMPARISONS = 1 << 28  # of characters or items, within one operation that cannot be stopped
MAX_COMPARED_CHARACTERS = 1 << 31  # where a text is compared with all texts of a list
MAX_SLOW_CHARACTERS = 64 << 10  # of a text for what takes a time quadratic in it
MAX_ADDRESS_CHARACTERS = 2 << 10  # of a text in which regular expressions look for addresses, each quadratic in it
MAX_KEYS = 8192  # that one call hashes: numbers can be made to collide
NUMBER_CHARACTERS = 330  # of the longest float; integers are written digit by digit up to MAX_INTEGER_BITS
REPR_SLAB_CHARACTERS = 64 << 10
SHORT_CHARACTERS = 1024  # of a text with which most operations cost less than to look at the clock
OBJECT_BYTES = 512  # of a container or an object besides its items: a namespace, an iterator with its frame
ITEM_BYTES = 80  # of an item that an operation makes, or of an argument
PIECE_BYTES = 8  # of the reference to a piece of a text
LARGE_BYTES = 4096  # of what is worth giving back to the budget
SEQUENCES = (list, tuple)
VIEWS: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()))
CONTAINERS: tuple[type[Any], ...] = (list, tuple, dict, set, *VIEWS)
_SEARCHED: tuple[type[Any], ...] = (list, tuple, *VIEWS)
_PLAIN = (str, bytes, int, float, type(None))


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
        self._produced_bytes += num_bytes
        if self._produced_bytes > MAX_PRODUCED_BYTES:
            self.require_bytes(0)

    def charge_value(self, value: Any) -> None:
        """Count a value that was made, without what lies in it."""
        self.charge(sys.getsizeof(value) + (0 if isinstance(value, _PLAIN) else OBJECT_BYTES))

    def charge_piece(self, text: str) -> None:
        """Count a piece of what is written, which may be the text of a number or a list."""
        self.charge(sys.getsizeof(text) + PIECE_BYTES)

    def give_back(self, value: Any) -> None:
        """Subtract a text or a list that was counted and is freed now."""
        self._produced_bytes -= sys.getsizeof(value)


class Renders(threading.local):
    """The budget of the render that runs in this thread."""

    def __init__(self) -> None:
        self.budget = RenderBudget()


def is_last_reference(references: int, value: Any) -> bool:
    """Whether a large text or list is freed when the caller's variable is.

    `references`: what the caller sees, `is_last_reference(sys.getrefcount(value), value)`.
    """
    return references == _OWN_REFERENCES and type(value) in (str, list) and sys.getsizeof(value) >= LARGE_BYTES


def _own_references() -> int:
    """What `sys.getrefcount` says of an object that lies in one variable of the caller."""
    value = object()
    return sys.getrefcount(value)


# From Python 3.14 on, callers lend their references without counting them: nothing is known to be freed.
_OWN_REFERENCES = _own_references() if sys.version_info < (3, 14) else 0


def require(what: str, value: int, most: int) -> None:
    """Raise TemplateLimitExceeded: `value` is above `most`."""
    if value > most:
        written = f"{value:,}" if value.bit_length() <= 64 else f"a number of {value.bit_length()} bits"
        refuse(f"{what}: {written}, and at most {most:,} are allowed")


def refuse(why: str) -> NoReturn:
    """Raises TemplateLimitExceeded."""
    raise TemplateLimitExceeded(
        f"The model's chat template asks for too much: {why}. "
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
    if not isinstance(value, CONTAINERS):
        return
    characters = 0
    for level in _levels(value):
        characters += sum(len(one) for one in level if isinstance(one, str | bytes))
        require("characters that are compared", characters, MAX_TEXT_CHARACTERS)


def require_membership(value: Any, container: Any) -> None:
    """Raise TemplateLimitExceeded: `value in container` compares too much."""
    if isinstance(container, _SEARCHED):
        if isinstance(value, str | bytes):
            most = len(container) * len(value)
            require("characters that are compared", most, MAX_COMPARED_CHARACTERS)
        elif isinstance(value, CONTAINERS):
            require_comparable(container)
    require_comparable(value)


def text_characters(value: Any) -> int:
    """An upper bound on the characters of `str(value)`, at no cost in memory.

    Raises:
        TemplateLimitExceeded: there are more than one text may have.
    """
    if isinstance(value, str):
        return len(value)
    if value is None or isinstance(value, int):
        return _own_characters(value)
    characters = 0
    for level in _levels(value):
        for part in level:
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


def _levels(value: Any) -> Iterator[list[Any]]:
    """`value`, what lies in it, what lies in that, …, as often as it does. Ends by a limit if it lies in itself."""
    level, seen, depth = [value], 1, 0
    while level:
        yield level
        depth += 1
        require("levels of values in one another", depth, MAX_NESTED_LEVELS)
        inner: list[Any] = []
        for one in level:
            if isinstance(one, _NESTING):
                inner.extend(_inner(one))
                require("values in one another", seen + len(inner), MAX_WALKED)
        seen += len(inner)
        level = inner


def _inner(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, jinja2.utils.Namespace):
        attributes = object.__getattribute__(value, "_Namespace__attrs")
        return [*attributes.keys(), *attributes.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    return list(value)


_NESTING: tuple[type[Any], ...] = (*CONTAINERS, jinja2.utils.Namespace, types.MethodType)
