"""Operators and methods of a chat template, with the size of their result computed before they run.

    bounded_operator("*", "ab", 10**9)        refused: 2,000,000,000 characters in one text
    bound_method("ab".ljust, (10**9,), {})    refused, too

Whatever is not named here makes at most a few times what it is given; that is counted once it is made.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from millstream_runtime.tokenizing.template_limits import (
    MAX_COMPARISONS,
    MAX_INTEGER_BITS,
    MAX_ITEMS,
    MAX_KEYS,
    MAX_SLOW_CHARACTERS,
    SEQUENCES,
    RenderBudget,
    refuse,
    require,
    require_comparable,
    require_items,
    require_membership,
    require_text,
    text_characters,
)

ESCAPED_CHARACTERS = 6  # of one character, as HTML or as JSON writes it
ENCODED_CHARACTERS = 100  # of one character, where an error handler writes its name
CASED_CHARACTERS = 3  # of one character, in the other case
SPLIT_BYTES = 64  # of a small text
# Python keeps every unknown name for ever, and looks for it among its files; some encodings are slow.
_ENCODINGS = ("utf-8", "utf8", "ascii", "latin-1", "utf-16", "utf-32")
_CASES = ("capitalize", "casefold", "lower", "swapcase", "title", "upper")
_NUMBER = re.compile(r"\d+")
_LINE_BREAKS = "\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029"
# Quadratic, unlike those from the start.
_SEARCHES_FROM_THE_END = frozenset({"rfind", "rindex", "rpartition", "rsplit"})
_SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
_SPACES += "\u2028\u2029\u202f\u205f\u3000"


def require_operation(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateLimitExceeded: `left operator right` is larger than a value may be."""
    if operator == "*":
        _require_product(left, right)
    elif operator == "%" and isinstance(left, str | bytes):
        require_text(percent_characters(left, right))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        require("bits in one number", left.bit_length() * max(right, 0), MAX_INTEGER_BITS)
    elif operator == "+":
        _require_sum(left, right)
    elif operator == "-" and not isinstance(left, int):
        require_comparable(left)  # the keys of a dictionary are hashed
        require_comparable(right)


def _require_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        require("bits in one number", left.bit_length() + right.bit_length(), MAX_INTEGER_BITS)
        return
    value, times = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(times, int):
        if isinstance(value, str | bytes):
            require_text(len(value) * times)
        elif isinstance(value, SEQUENCES):
            require_items(len(value) * times)


def _require_sum(left: Any, right: Any) -> None:
    if isinstance(left, str | bytes) and isinstance(right, str | bytes):
        escaped = ESCAPED_CHARACTERS if isinstance(left, Markup) or isinstance(right, Markup) else 1
        require_text(escaped * (len(left) + len(right)))
    elif isinstance(left, int) and isinstance(right, int):
        require("bits in one number", max(left.bit_length(), right.bit_length()), MAX_INTEGER_BITS)
    elif isinstance(left, SEQUENCES) and isinstance(right, SEQUENCES):
        require_items(len(left) + len(right))


def percent_characters(template: str | bytes, values: Any) -> int:
    """An upper bound on the characters of `template % values`: every number in the template might be a width."""
    text = template.decode("latin-1") if isinstance(template, bytes) else template
    conversions = text.count("%")
    characters = len(text) + (sum(int(number[:20]) for number in _NUMBER.findall(text)) if conversions else 0)
    given = list(values) if isinstance(values, tuple) else [values]
    if "*" in text:
        characters += sum(abs(value) for value in given if isinstance(value, int))
    require_text(characters)
    if "r" in text or "a" in text:
        given = [[value] for value in given]  # a text in a list counts as it is represented
    factor = conversions if isinstance(values, Mapping) else 1
    factor *= ESCAPED_CHARACTERS if isinstance(template, Markup) else 1
    return characters + factor * sum(text_characters(value) for value in given)


def require_method(budget: RenderBudget, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise TemplateLimitExceeded: `method(*args, **kwargs)`, bound to a value, would make or take too much."""
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    given = [*args, *kwargs.values()]
    for value in given:
        require_comparable(value)
    if isinstance(owner, str | bytes):
        _require_method_of_text(owner, name, given)
        first = args[0] if args else kwargs.get("sep", kwargs.get("encoding"))
        _require_search(budget, owner, name, first)
    elif name in ("to_bytes", "from_bytes", "fromkeys"):
        _require_conversion(name, given)
    elif name in ("index", "count") and given:
        require_membership(given[0], owner)
    elif name == "isdisjoint":
        require_comparable(owner)


def _require_method_of_text(owner: str | bytes, name: str, given: list[Any]) -> None:
    escaped = 1
    if isinstance(owner, Markup):  # what it is given is made text, and escaped
        escaped = ESCAPED_CHARACTERS
        require_text(escaped * sum(text_characters(value) for value in given))
    bound = _OF_TEXTS.get(name)
    if bound is not None:
        require_text(escaped * bound(owner, given))
    if name in ("strip", "lstrip", "rstrip"):
        require_strip(owner, given)
    elif name in ("striptags", "unescape"):
        require("characters with tags or entities", len(owner), MAX_SLOW_CHARACTERS)


def _require_search(budget: RenderBudget, owner: str | bytes, name: str, first: Any) -> None:
    """`first`: a separator, what is looked for, or an encoding."""
    if name in ("split", "rsplit", "splitlines"):
        separator = first if isinstance(first, str | bytes) else None
        budget.require_bytes(sys.getsizeof(owner) + SPLIT_BYTES * _parts(owner, separator))
    if name in _SEARCHES_FROM_THE_END and isinstance(first, str | bytes):
        require("comparisons in one operation", len(owner) * len(first), MAX_COMPARISONS)
    elif name in ("encode", "decode") and first is not None:
        encoding = str(first)
        if encoding.lower().replace("_", "-") not in _ENCODINGS:
            refuse(f"the encoding {encoding[:40]!r}, and only {', '.join(_ENCODINGS)} are allowed")


def require_strip(text: str | bytes, given: list[Any]) -> None:
    """Raise TemplateLimitExceeded: every character of the text may be compared with every one to strip."""
    if given and isinstance(given[0], str | bytes):
        require("comparisons in one operation", len(text) * len(given[0]), MAX_COMPARISONS)


def _require_conversion(name: str, given: list[Any]) -> None:
    if name == "to_bytes":
        require_text(max((value for value in given if isinstance(value, int)), default=0))
    elif name == "from_bytes" and given:
        length = len(given[0]) if hasattr(given[0], "__len__") else MAX_ITEMS  # of an iterator
        require("bytes in one number", length, MAX_INTEGER_BITS // 8)
    elif name == "fromkeys" and given:
        require_keys(given[0])


def require_keys(keys: Any) -> None:
    """Raise TemplateLimitExceeded: one call would hash more keys, or slower ones, than it may."""
    require_comparable(keys)
    if hasattr(keys, "__len__"):
        require("keys in one call", len(keys), MAX_KEYS)


def line_count(text: str) -> int:
    """At most how many lines `text.splitlines()` has."""
    return sum(map(text.count, _LINE_BREAKS)) + 1


def _parts(text: str | bytes, separator: str | bytes | None) -> int:
    """At most how many parts a text is split into."""
    if separator and isinstance(separator, str) == isinstance(text, str):
        return text.count(separator) + 1  # type: ignore[arg-type]
    if isinstance(text, bytes):
        return len(text) + 1
    return sum(map(text.count, _SPACES)) + 1


def _width(text: str | bytes, given: list[Any]) -> int:
    widths = [value for value in given if isinstance(value, int)]
    return max(len(text), *widths) if widths else len(text)


def replaced_characters(text: str | bytes, old: Any, new: Any) -> int:
    """An upper bound on the characters of `text.replace(old, new)`."""
    if not isinstance(old, str | bytes) or not isinstance(new, str | bytes):
        return len(text)
    if isinstance(text, str) != isinstance(old, str):
        return len(text)
    times = text.count(old) if old else len(text) + 1  # type: ignore[arg-type]
    return len(text) + times * len(new)


def joined_characters(separator: str | bytes, values: Any) -> int:
    """An upper bound on the characters of `separator.join(values)`."""
    if isinstance(values, str):
        return len(values) * (len(separator) + 1)
    if not hasattr(values, "__len__"):
        return 0
    require_items(len(values))
    characters = sum(len(value) if isinstance(value, bytes) else text_characters(value) for value in values)
    return characters + len(values) * len(separator)


def _translated_characters(text: str | bytes, given: list[Any]) -> int:
    table = given[0] if given else None
    values = table.values() if isinstance(table, dict) else table if isinstance(table, SEQUENCES) else ()
    return len(text) * max((len(value) for value in values if isinstance(value, str)), default=1)


def cased_characters(text: str | bytes) -> int:
    """An upper bound on the characters of `text.upper()` and the like."""
    return len(text) if text.isascii() else CASED_CHARACTERS * len(text)


def _tabs(text: str | bytes, given: list[Any]) -> int:
    size = next((value for value in given if isinstance(value, int)), 8)
    return len(text) + (text.count("\t") if isinstance(text, str) else text.count(b"\t")) * max(size, 0)


_OF_TEXTS: dict[str, Callable[[str | bytes, list[Any]], int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _width),
    **dict.fromkeys(_CASES, lambda text, given: cased_characters(text)),
    "expandtabs": _tabs,
    "replace": lambda text, given: replaced_characters(text, *given[:2]) if len(given) > 1 else len(text),
    "join": lambda text, given: joined_characters(text, given[0]) if given else len(text),
    "translate": _translated_characters,
    "encode": lambda text, given: len(text) * (ENCODED_CHARACTERS if len(given) > 1 else 1),
    "decode": lambda text, given: len(text) * (4 if len(given) > 1 else 1),
    "hex": lambda text, given: len(text) * 4,
    "format": lambda text, given: len(text),  # the environment's own, part by part
}


def require_format_spec(spec: str) -> None:
    """Raise TemplateLimitExceeded: a width or a precision of `str.format` is larger than a text may be."""
    for number in _NUMBER.findall(spec):
        require_text(int(number[:20]))
