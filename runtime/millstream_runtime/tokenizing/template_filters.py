"""The filters and tests of chat templates: what each makes is looked at before it runs, and counted after.

Results that are made one by one (`map`, `select`, `batch`) are counted one by one.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from io import StringIO
from typing import Any

import jinja2
import jinja2.filters
import jinja2.runtime

from millstream_runtime.tokenizing.template_filter_limits import REQUIRED, require_join, require_sum
from millstream_runtime.tokenizing.template_limits import (
    ITEM_BYTES,
    OBJECT_BYTES,
    SHORT_CHARACTERS,
    RenderBudget,
    Renders,
    require,
    require_comparable,
    require_items,
    require_membership,
    require_text,
    text_characters,
)

MAX_JSON_INDENT = 64
MAX_ATTRIBUTE_CHARACTERS = 256  # `a.b.c` is looked up for every item
# They give what they were given, or a part of it.
_MAKE_NOTHING = frozenset({"d", "default", "first", "last", "attr", "random", "min", "max", "length", "count"})
_CONSUME = frozenset(
    {
        *("join", "list", "sort", "unique", "min", "max", "groupby", "sum", "batch", "slice", "reverse"),
        *("urlencode", "xmlattr"),
    }
)
# Of a text, a range or a view, they make the items, too, or take long for each.
_MAKE_ITEMS = frozenset({"list", "sort", "unique", "min", "max", "groupby", "sum", "batch", "slice"})
_MAKE_PAIRS = frozenset({"dictsort", "groupby"})
_WITH_ATTRIBUTE = frozenset(
    {"map", "selectattr", "rejectattr", "sort", "unique", "min", "max", "groupby", "sum", "join"}
)
_COMPARED = frozenset({"sort", "unique", "min", "max", "groupby", "dictsort", "sum"})
_TO_TEXT = frozenset(
    {
        *("string", "upper", "lower", "title", "capitalize", "trim", "escape", "e", "forceescape", "safe", "urlencode"),
        *("striptags", "wordcount", "xmlattr", "urlize", "wordwrap", "truncate", "indent", "center", "replace"),
        *("format", "pprint"),
    }
)
_COMPARING_TESTS = frozenset(
    ("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le")
)


def bounded_filter(name: str, original: Callable[..., Any], renders: Renders) -> Callable[..., Any]:
    """`original`, as a filter that needs the context: Jinja computes no such filter while it compiles."""
    signature = _signature(inspect.unwrap(original))
    defaults = _defaults(signature)
    passed = _passed(original)
    require_given, require_result = _before(name), REQUIRED.get(name)
    has_attribute, makes_nothing, makes_pairs = name in _WITH_ATTRIBUTE, name in _MAKE_NOTHING, name in _MAKE_PAIRS

    @jinja2.pass_context
    @functools.wraps(original)
    def bounded(context: jinja2.runtime.Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = renders.budget
        if args or kwargs or type(value) is not str or len(value) > SHORT_CHARACTERS:
            budget.check_time()
            value = require_given(value, budget)
            if has_attribute and (args or kwargs):
                _require_attribute(name, signature, value, args, kwargs)
            if require_result is not None:
                require_result(value, _named(signature, value, args, kwargs) if args or kwargs else defaults)
            if name in ("join", "sum"):
                value, args, kwargs = _with_attributes(context, value, args, kwargs, name)
        result = original(*passed(context), value, *args, **kwargs)
        if type(result) is str:
            budget.charge(sys.getsizeof(result))
            return result
        if makes_nothing:
            return result
        if isinstance(result, Iterator):
            budget.charge(2 * OBJECT_BYTES)
            return _counted(result, budget)
        budget.charge_value(result)
        if makes_pairs:
            for pair in result:
                budget.charge_value(pair)
                budget.charge_value(pair[1])  # a list, of `groupby`
        return result

    return bounded


def _passed(original: Callable[..., Any]) -> Callable[[jinja2.runtime.Context], tuple[Any, ...]]:
    """What Jinja gives to this filter before the value."""
    kind = getattr(original, "jinja_pass_arg", None)
    if kind is None:
        return lambda context: ()
    return {
        "context": lambda context: (context,),
        "eval_context": lambda context: (context.eval_ctx,),
        "environment": lambda context: (context.environment,),
    }[kind.name]


def _before(name: str) -> Callable[[Any, RenderBudget], Any]:
    """What is done to a value before the filter sees it."""
    is_consumed, is_compared, is_made_text = name in _CONSUME, name in _COMPARED, name in _TO_TEXT

    def require_given(value: Any, budget: RenderBudget) -> Any:
        if is_consumed and not isinstance(value, list | tuple):
            value = _counted_items(name, value, budget)
        if is_compared:
            require_comparable(value)
        if is_made_text:
            budget.require_bytes(text_characters(value))
        return value

    return require_given


def bounded_test(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, if it compares or makes a text of a value; else itself."""
    if name == "in":
        return _membership_test(original)
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


def _membership_test(original: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(value: Any, seq: Any) -> Any:
        require_membership(value, seq)
        return original(value, seq)

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


def _counted_items(name: str, value: Any, budget: RenderBudget) -> Any:
    """`value`, or a list of what it gives if it is an iterator. Raises TemplateLimitExceeded: too much."""
    if isinstance(value, Iterator):
        return bounded_list(value, budget)
    if name in _MAKE_ITEMS and hasattr(value, "__len__"):
        require_items(len(value))
        budget.charge(ITEM_BYTES * len(value))
    return value


def _require_attribute(
    name: str, signature: inspect.Signature | None, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    if name in ("selectattr", "rejectattr"):
        attribute = args[0] if args else None
    elif name == "map":
        attribute = kwargs.get("attribute")
    else:
        attribute = _named(signature, value, args, kwargs).get("attribute")
    require_comparable(attribute)  # is hashed
    if isinstance(attribute, str):
        require("characters in the name of an attribute", len(attribute), MAX_ATTRIBUTE_CHARACTERS)


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
        text, characters = StringIO(), 0
        for piece in encoder.iterencode(value):  # piece by piece: of lists that lie in themselves twice there is no end
            renders.budget.check_time()
            characters += len(piece)
            require_text(characters)
            text.write(piece)
        return text.getvalue()

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
        require_join(value, arguments)
    else:
        require_sum(value, arguments)
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


def _defaults(signature: inspect.Signature | None) -> Mapping[str, Any]:
    """The arguments of a call with a value alone."""
    parameters = signature.parameters.values() if signature is not None else ()
    return {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}


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
