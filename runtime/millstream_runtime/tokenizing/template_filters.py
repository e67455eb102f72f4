"""The filters and tests of chat templates, each with the size of its result computed before it runs.

    {{ x | center(10**9) }}      refused before a text is made
    {{ range(9) | batch(10**9, 0) }}, {{ x | indent(10**9) }}, {{ x | tojson(indent=10**9) }}, …

Results that are made one by one (`map`, `select`, `batch`) are counted one by one.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.filters
import jinja2.runtime
from markupsafe import Markup

from millstream_runtime.tokenizing.template_limits import (
    MAX_ITEMS,
    MAX_SLOW_CHARACTERS,
    MAX_TEXT_CHARACTERS,
    RenderBudget,
    Renders,
    require,
    require_comparable,
    require_items,
    require_text,
    text_characters,
)
from millstream_runtime.tokenizing.template_operations import (
    ESCAPED_CHARACTERS,
    joined_characters,
    percent_characters,
    replaced_characters,
    require_strip,
)

MAX_JSON_INDENT = 64
MAX_PRECISION = 300  # of `round`: a float has no more digits
MAX_PRETTY_CHARACTERS = 1 << 20  # `pprint` and `wordwrap` are slow, and cannot be stopped
ITEM_BYTES = 64  # of an item that is made on the way through a filter
URL_CHARACTERS = 12  # of one character in a URL
# They give what they were given, or a part of it.
_MAKE_NOTHING = frozenset({"d", "default", "first", "last", "attr", "random", "min", "max", "length", "count"})
_CONSUME = frozenset({"join", "list", "sort", "unique", "min", "max", "groupby", "sum", "batch", "slice", "reverse"})
_COMPARED = frozenset({"sort", "unique", "min", "max", "groupby", "dictsort", "sum"})
_TO_TEXT = frozenset(
    {
        *("string", "upper", "lower", "title", "capitalize", "trim", "escape", "e", "forceescape", "safe", "urlencode"),
        *("striptags", "wordcount", "xmlattr", "urlize", "wordwrap", "truncate", "indent", "center", "replace"),
        *("format", "pprint"),
    }
)
_COMPARING_TESTS = frozenset(
    {
        *("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le"),
        "in",
    }
)


def bounded_filter(name: str, original: Callable[..., Any], renders: Renders) -> Callable[..., Any]:
    """`original`, as a filter that needs the context: Jinja computes no such filter while it compiles."""
    signature = _signature(inspect.unwrap(original))
    require_result = _REQUIRED.get(name)

    @jinja2.pass_context
    @functools.wraps(original)
    def bounded(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = renders.budget
        budget.check_time()
        if name in _CONSUME and isinstance(value, Iterator):
            value = bounded_list(value, budget)
        if name in _COMPARED:
            require_comparable(value)
        if name in _TO_TEXT:
            budget.require_bytes(text_characters(value))
        if require_result is not None:
            require_result(value, _named(signature, value, args, kwargs))
        if name in ("join", "sum"):
            value, args, kwargs = _with_attributes(context, value, args, kwargs, name)
        result = context.call(original, value, *args, **kwargs)
        if name in _MAKE_NOTHING:
            return result
        if isinstance(result, Iterator):
            return _counted(result, budget)
        budget.charge_value(result)
        return result

    return bounded


def bounded_test(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, if it compares or makes a text of a value; else itself."""
    if name in _COMPARING_TESTS:
        return _comparing_test(original)
    if name in ("lower", "upper"):
        return _text_test(original)
    return original


def _comparing_test(original: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        require_comparable(value)
        return original(value, *args, **kwargs)

    return bounded


def _text_test(original: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(value: Any) -> Any:
        text_characters(value)
        return original(value)

    return bounded


def bounded_list(values: Iterator[Any], budget: RenderBudget) -> list[Any]:
    """What an iterator gives. Raises TemplateLimitExceeded: too much."""
    found: list[Any] = []
    for value in values:
        require_items(len(found) + 1)
        budget.check_time()
        found.append(value)
    budget.charge_value(found)
    return found


def json_filter(renders: Renders) -> Callable[..., str]:
    """`tojson` as `transformers` has it: Jinja's own escapes HTML characters, which would change the prompt."""

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        width = indent if isinstance(indent, int) else len(indent or "")
        require("spaces of indentation in JSON", width, MAX_JSON_INDENT)
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        pieces, characters = [], 0
        for piece in encoder.iterencode(value):  # piece by piece: of lists that lie in themselves twice there is no end
            renders.budget.check_time()
            characters += len(piece)
            require_text(characters)
            pieces.append(piece)
        return "".join(pieces)

    return to_json


def _counted(values: Iterator[Any], budget: RenderBudget) -> Iterator[Any]:
    for value in values:
        budget.check_time()
        budget.charge(ITEM_BYTES)
        if isinstance(value, list):
            budget.charge_value(value)
        yield value


def _with_attributes(
    context: jinja2.runtime.Context, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The attributes of the items instead of the items, whose size is then known: `join`, and `sum` of lists."""
    arguments = dict(zip(("d", "attribute") if name == "join" else ("attribute", "start"), args, strict=False))
    arguments |= kwargs
    attribute = arguments.pop("attribute", None)
    if attribute is not None:
        attribute_of = jinja2.filters.make_attrgetter(context.environment, attribute)
        value = [attribute_of(item) for item in value]
    if name == "join":
        _require_join(value, arguments)
    else:
        _require_sum(value, arguments)
    return value, (), arguments


def _signature(original: Callable[..., Any]) -> inspect.Signature | None:
    try:
        signature = inspect.signature(original)
    except ValueError:  # of a few functions written in C
        return None
    parameters = list(signature.parameters.values())
    if getattr(original, "jinja_pass_arg", None) is not None:
        parameters = parameters[1:]
    return signature.replace(parameters=parameters)


def _named(
    signature: inspect.Signature | None, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Arguments by name; {} where the filter itself will refuse them."""
    if signature is None:
        return {}
    try:
        bound = signature.bind(value, *args, **kwargs)
    except TypeError:
        return {}
    bound.apply_defaults()
    return bound.arguments


def _require_center(value: Any, given: Mapping[str, Any]) -> None:
    width = given.get("width")
    require_text(max(text_characters(value), width if isinstance(width, int) else 0))


def _require_indent(value: Any, given: Mapping[str, Any]) -> None:
    width, lines = given.get("width"), value.count("\n") + 2 if isinstance(value, str) else text_characters(value) + 2
    characters = width if isinstance(width, int) else text_characters(width)
    require_text(text_characters(value) + lines * max(characters, 0))


def _require_join(value: Any, given: Mapping[str, Any]) -> None:
    separator = text_characters(given.get("d", ""))
    if isinstance(value, str):
        require_text(len(value) * (1 + separator))
    elif hasattr(value, "__len__"):
        escaped = ESCAPED_CHARACTERS if any(isinstance(one, Markup) for one in value) else 1
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
    require("characters to print prettily", text_characters([value]), MAX_PRETTY_CHARACTERS)


def _require_wordwrap(value: Any, given: Mapping[str, Any]) -> None:
    characters, width, between = text_characters(value), given.get("width"), given.get("wrapstring")
    require("characters to wrap", characters, MAX_PRETTY_CHARACTERS)
    lines = 2 * characters // max(width if isinstance(width, int) else 1, 1) + 2
    require_text(characters + (lines + str(value).count("\n")) * text_characters(between or "\n"))


def _require_truncate(value: Any, given: Mapping[str, Any]) -> None:
    require_text(text_characters(value) + text_characters(given.get("end", "")))


def _require_slow_text(value: Any, given: Mapping[str, Any]) -> None:
    characters = text_characters(value)
    require("characters for a filter that looks for addresses", characters, MAX_SLOW_CHARACTERS)
    attributes = text_characters(given.get("target") or "") + text_characters(given.get("rel") or "")
    require_text(characters * (ESCAPED_CHARACTERS + 64 + attributes))


def _require_escaped(value: Any, _given: Mapping[str, Any]) -> None:
    require("characters of one text, escaped", text_characters(value), MAX_TEXT_CHARACTERS)


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


def _require_sum(value: Any, given: Mapping[str, Any]) -> None:
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


_REQUIRED: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "batch": _require_batch,
    "center": _require_center,
    "e": _require_escaped,
    "escape": _require_escaped,
    "forceescape": _require_escaped,
    "format": _require_format,
    "indent": _require_indent,
    "int": _require_int,
    "list": _require_list,
    "pprint": _require_pprint,
    "replace": _require_replace,
    "round": _require_round,
    "slice": _require_slice,
    "trim": _require_trim,
    "truncate": _require_truncate,
    "urlencode": _require_urlencode,
    "urlize": _require_slow_text,
    "wordwrap": _require_wordwrap,
    "xmlattr": _require_urlencode,
}
