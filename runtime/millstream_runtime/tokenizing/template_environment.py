"""The Jinja environment of chat templates: a sandbox that stops code, and what computes too long or makes too much.

`transformers` gives templates the same helpers: `tojson`, `raise_exception`, `strftime_now`, loop controls and the
`{% generation %}` tag. The compiled template asks before every operation that could make something large, and looks at
the clock in every iteration of a loop, every call and every filter:

    a * b, a % b, -a        call_binop, call_unop
    f(x), text.method(x)    call
    x | filter, x is test   template_filters
    everything else         where `template_compiler` calls
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, SupportsIndex

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
from markupsafe import Markup

from millstream_runtime.tokenizing.template_compiler import TemplateCompiler
from millstream_runtime.tokenizing.template_filters import bounded_filter, bounded_list, bounded_test, json_filter
from millstream_runtime.tokenizing.template_globals import template_globals
from millstream_runtime.tokenizing.template_limits import (
    ITEM_BYTES,
    OBJECT_BYTES,
    SHORT_CHARACTERS,
    Renders,
    require_comparable,
    require_items,
    require_membership,
    require_text,
    text_characters,
)
from millstream_runtime.tokenizing.template_operations import (
    ESCAPED_CHARACTERS,
    require_format_spec,
    require_method,
    require_operation,
)

_TEXTS, _LISTS = {str}, {list}
FEW_ARGUMENTS = 16  # more are a list or a dictionary that was unpacked


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Every operation counts against the budget of the render that runs in this thread (`renders.budget`)."""

    intercepted_binops = frozenset({"+", "-", "*", "//", "%", "**"})
    intercepted_unops = frozenset({"-"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self.code_generator_class = TemplateCompiler
        self.renders = Renders()
        self.finalize = _finalize
        self.filters["tojson"] = json_filter(self.renders)
        tests: Mapping[str, Any] = self.tests
        self.filters = {name: bounded_filter(name, one, self.renders) for name, one in self.filters.items()}
        self.tests = {name: bounded_test(name, one) for name, one in tests.items()}
        self.globals.update(template_globals(self.renders))

    def check_time(self) -> None:
        self.renders.budget.check_time()

    def call_binop(self, context: jinja2.runtime.Context | None, operator: str, left: Any, right: Any) -> Any:
        self.check_time()
        require_operation(operator, left, right)
        return self.made(self.binop_table[operator](left, right))

    def added(self, parts: tuple[Any, ...]) -> Any:
        """`a + b + c`, of texts and of lists in one step: what lies between is not made."""
        kinds = set(map(type, parts))
        if kinds == _TEXTS:
            return self._joined(parts)
        if kinds == _LISTS:
            require_items(sum(map(len, parts)))
            return self.made(list(itertools.chain.from_iterable(parts)))
        return functools.reduce(lambda left, right: self.call_binop(None, "+", left, right), parts)

    def _joined(self, parts: tuple[str, ...]) -> str:
        characters = sum(map(len, parts))
        if characters > SHORT_CHARACTERS:
            self.check_time()
            require_text(characters)
        text = "".join(parts)
        self.renders.budget.charge(sys.getsizeof(text))
        return text

    def call_unop(self, context: jinja2.runtime.Context, operator: str, arg: Any) -> Any:
        return self.made(self.unop_table[operator](arg))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = __self.renders.budget
        budget.check_time()
        num_arguments = len(args) + len(kwargs)
        if num_arguments > FEW_ARGUMENTS:
            budget.charge(ITEM_BYTES * num_arguments)
        if isinstance(__obj, jinja2.runtime.Macro):
            return super().call(__context, __obj, *args, **kwargs)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if name == "join" and isinstance(owner, str | bytes) and args and isinstance(args[0], Iterator):
            args = (bounded_list(args[0], budget), *args[1:])
        if owner is not None:
            require_method(budget, __obj, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if name != "get":  # what a mapping holds was there before
            budget.charge_value(result)
        if isinstance(owner, str | bytes) and isinstance(result, list | tuple):
            for part in result:
                budget.charge_value(part)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template, is_map = value.__self__, value.__name__ == "format_map"
        self.renders.budget.charge(OBJECT_BYTES)

        def formatted(*args: Any, **kwargs: Any) -> str:
            if isinstance(template, Markup):
                raise jinja2.exceptions.SecurityError("A template may not format a text that is marked as safe.")
            if is_map and (kwargs or len(args) != 1):
                raise TypeError("format_map() takes exactly one argument")
            given: tuple[Sequence[Any], Mapping[str, Any]] = ((), args[0]) if is_map else (args, kwargs)
            return _BoundedFormatter(self).vformat(template, *given)

        return formatted

    def concatenated(self, join: Callable[[Iterable[Any]], str], parts: tuple[Any, ...]) -> str:
        """`a ~ b`."""
        if join is jinja2.runtime.str_join and set(map(type, parts)) == _TEXTS:
            return self._joined(parts)
        self.renders.budget.check_time()
        escaped = ESCAPED_CHARACTERS if join is jinja2.runtime.markup_join else 1
        require_text(escaped * sum(text_characters(part) for part in parts))
        text = join(parts)
        self.renders.budget.charge_value(text)
        return text

    def made(self, value: Any) -> Any:
        """Count a literal, a slice, or what an operator made."""
        self.renders.budget.charge_value(value)
        return value

    def as_key(self, value: Any) -> Any:
        """What is compared or hashed."""
        if type(value) is str and len(value) < SHORT_CHARACTERS:
            return value
        require_comparable(value)
        self.check_time()
        return value

    def is_in(self, value: Any, container: Any) -> bool:
        """`value in container`."""
        if type(value) is not str or type(container) is not dict:
            require_membership(value, container)
            self.check_time()
        return value in container

    def written(self, value: Any) -> str:
        """`{{ value }}`."""
        if type(value) is str:
            return value
        text_characters(value)
        return str(value)

    def buffer(self) -> list[str]:
        return _Buffer(self.renders)

    def concat(self, parts: Iterable[str]) -> str:
        if not isinstance(parts, _Buffer):  # a block gives its pieces one by one
            pieces = self.buffer()
            pieces.extend(parts)
            parts = pieces
        text = "".join(parts)
        self.renders.budget.charge_value(text)
        return text


class _Buffer(list[str]):
    """The pieces of a block, a macro or a call, until they are one text."""

    def __init__(self, renders: Renders) -> None:
        super().__init__()
        self._renders = renders
        self._characters = 0

    def append(self, text: str) -> None:
        self._characters += len(text)
        require_text(self._characters)
        self._renders.budget.charge_piece(text)
        super().append(text)

    def extend(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.append(text)

    def insert(self, index: SupportsIndex, text: str) -> None:
        raise NotImplementedError


class _BoundedFormatter(jinja2.sandbox.SandboxedFormatter):
    """`str.format`, with every width looked at, and every field counted."""

    def __init__(self, environment: TemplateEnvironment) -> None:
        super().__init__(environment)
        self._environment = environment
        self._characters = 0

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            require_text(10 * text_characters(value))  # "!a" writes \U0001f600 for one character
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        require_format_spec(format_spec)
        text_characters(value)
        text = Formatter.format_field(self, value, format_spec)
        self._characters += len(text)
        require_text(self._characters)
        self._environment.check_time()
        return text


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it renders its body.

    As in `transformers`, it is a call block: variables that are set in it are unknown after it.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Callable[[], str]) -> str:
        return caller()


@jinja2.pass_context
def _finalize(_context: jinja2.runtime.Context, value: Any) -> Any:
    """What is escaped and written. As it needs the context, Jinja computes nothing while it compiles."""
    require_text(ESCAPED_CHARACTERS * text_characters(value))
    return value
