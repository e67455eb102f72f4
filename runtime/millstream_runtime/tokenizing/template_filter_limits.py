"""What each filter of a chat template may make, computed from its arguments before it runs.

    {{ x | center(10**9) }}      refused before a text is made
    {{ range(9) | batch(10**9, 0) }}, {{ x | indent(10**9) }}, {{ x | replace("", y) }}, …

A filter that is not named here makes at most a few times what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any

from markupsafe import Markup

from millstream_runtime.tokenizing.template_limits import (
    MAX_ADDRESS_CHARACTERS,
    MAX_ITEMS,
    MAX_SLOW_CHARACTERS,
    require,
    require_items,
    require_text,
    text_characters,
)
from millstream_runtime.tokenizing.template_operations import (
    ESCAPED_CHARACTERS,
    cased_characters,
    joined_characters,
    line_count,
    percent_characters,
    replaced_characters,
    require_strip,
)

MAX_PRECISION = 300  # of `round`: a float has no more digits
MAX_WORDS_CHARACTERS = 1 << 20  # `title` and `wordcount` make a text of every word
MAX_SCHEMES = 64  # of addresses
URL_CHARACTERS = 12  # of one character in a URL


def _require_center(value: Any, given: Mapping[str, Any]) -> None:
    width = given.get("width")
    require_text(max(text_characters(value), width if isinstance(width, int) else 0))


def _require_indent(value: Any, given: Mapping[str, Any]) -> None:
    width, lines = given.get("width"), line_count(value) + 1 if isinstance(value, str) else text_characters(value) + 2
    characters = width if isinstance(width, int) else text_characters(width)
    require_text(text_characters(value) + lines * max(characters, 0))


def require_join(value: Any, given: Mapping[str, Any]) -> None:
    separator = text_characters(given.get("d", ""))
    if isinstance(value, str):
        require_text(len(value) * (1 + separator))
    elif hasattr(value, "__len__"):
        escaped = ESCAPED_CHARACTERS if any(isinstance(one, Markup) for one in (given.get("d"), *value)) else 1
        require_text(escaped * (joined_characters("", value) + len(value) * separator))


def _require_replace(value: Any, given: Mapping[str, Any]) -> None:
    new = given.get("new")
    text, old = value if isinstance(value, str) else str(value), given.get("old")
    text_characters(old)
    if not isinstance(new, str):
        new = "x" * text_characters(new)
    escaped = ESCAPED_CHARACTERS if any(isinstance(one, Markup) for one in (value, old, new)) else 1
    require_text(escaped * replaced_characters(text, str(old), new))


def _require_format(value: Any, given: Mapping[str, Any]) -> None:
    text = value if isinstance(value, str) else str(value)
    require_text(percent_characters(text, given.get("kwargs") or given.get("args") or ()))


def _require_pprint(value: Any, _given: Mapping[str, Any]) -> None:
    require("characters to print prettily", text_characters([value]), MAX_SLOW_CHARACTERS)


def _require_wordwrap(value: Any, given: Mapping[str, Any]) -> None:
    characters, width, between = text_characters(value), given.get("width"), given.get("wrapstring")
    require("characters to wrap", characters, MAX_SLOW_CHARACTERS)
    lines = 2 * characters // max(width if isinstance(width, int) else 1, 1) + 2
    require_text(characters + (lines + line_count(str(value))) * text_characters(between or "\n"))


def _require_truncate(value: Any, given: Mapping[str, Any]) -> None:
    require_text(text_characters(value) + text_characters(given.get("end", "")))


def _require_urlize(value: Any, given: Mapping[str, Any]) -> None:
    characters, schemes = text_characters(value), given.get("extra_schemes")
    require("characters for a filter that looks for addresses", characters, MAX_ADDRESS_CHARACTERS)
    if isinstance(schemes, Sized):
        require("schemes of addresses", len(schemes), MAX_SCHEMES)
    attributes = text_characters(given.get("target") or "") + text_characters(given.get("rel") or "")
    require_text(characters * (ESCAPED_CHARACTERS + 64 + attributes))


def _require_striptags(value: Any, _given: Mapping[str, Any]) -> None:
    require("characters with tags to strip", text_characters(value), MAX_SLOW_CHARACTERS)


def _require_case(value: Any, _given: Mapping[str, Any]) -> None:
    require_text(cased_characters(value) if isinstance(value, str) else text_characters(value))


def _require_words(value: Any, _given: Mapping[str, Any]) -> None:
    require("characters of words", text_characters(value), MAX_WORDS_CHARACTERS)


def _require_escaped(value: Any, _given: Mapping[str, Any]) -> None:
    if isinstance(value, str):
        require_text(len(value) + (ESCAPED_CHARACTERS - 1) * sum(map(value.count, "&<>'\"")))
    else:
        require_text(ESCAPED_CHARACTERS * text_characters(value))


def _require_urlencode(value: Any, _given: Mapping[str, Any]) -> None:
    require_text(URL_CHARACTERS * text_characters(value))


def _require_trim(value: Any, given: Mapping[str, Any]) -> None:
    if given.get("chars") is not None:
        require_strip(value if isinstance(value, str) else str(value), [given["chars"]])


def _require_batch(_value: Any, given: Mapping[str, Any]) -> None:
    linecount = given.get("linecount")
    if isinstance(linecount, int):
        require_items(linecount)


def _require_slice(_value: Any, given: Mapping[str, Any]) -> None:
    slices = given.get("slices")
    if isinstance(slices, int):
        require_items(slices)


def _require_list(value: Any, _given: Mapping[str, Any]) -> None:
    if hasattr(value, "__len__"):
        require_items(len(value))


def require_sum(value: Any, given: Mapping[str, Any]) -> None:
    start = given.get("start", 0)
    if not isinstance(start, list | tuple) or not hasattr(value, "__len__"):
        return
    items = len(start) + sum(len(one) for one in value if isinstance(one, list | tuple))
    require_items(items)
    require("items copied in one sum", items * len(value), 64 * MAX_ITEMS)


def _require_int(value: Any, _given: Mapping[str, Any]) -> None:
    if isinstance(value, str):
        require("digits in one number", len(value), 4300)


def _require_round(_value: Any, given: Mapping[str, Any]) -> None:
    precision = given.get("precision")
    if isinstance(precision, int):
        require("digits to round to", abs(precision), MAX_PRECISION)


REQUIRED: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "batch": _require_batch,
    "capitalize": _require_case,
    "center": _require_center,
    "e": _require_escaped,
    "escape": _require_escaped,
    "forceescape": _require_escaped,
    "format": _require_format,
    "indent": _require_indent,
    "int": _require_int,
    "list": _require_list,
    "lower": _require_case,
    "pprint": _require_pprint,
    "replace": _require_replace,
    "round": _require_round,
    "slice": _require_slice,
    "striptags": _require_striptags,
    "title": _require_words,
    "trim": _require_trim,
    "truncate": _require_truncate,
    "upper": _require_case,
    "urlencode": _require_urlencode,
    "urlize": _require_urlize,
    "wordcount": _require_words,
    "wordwrap": _require_wordwrap,
    "xmlattr": _require_urlencode,
}
