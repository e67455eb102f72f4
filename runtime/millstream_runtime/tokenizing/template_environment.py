"""The Jinja environment of chat templates: a sandbox that stops code, and what computes too long or makes too much.

`transformers` gives templates the same helpers: `tojson`, `raise_exception`, `strftime_now`, loop controls and the
`{% generation %}` tag. The compiled template asks before every operation that could make something large, and looks at
the clock in every iteration of a loop, every call and every filter:

    a + b, a * b, a % b     call_binop
    f(x), text.method(x)    call
    x | filter, x is test   template_filters
    everything else         where `template_compiler` calls
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from string import Formatter
from typing import Any, NoReturn, SupportsIndex

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from markupsafe import Markup

from millstream_runtime.tokenizing.template_compiler import TemplateCompiler
from millstream_runtime.tokenizing.template_filters import bounded_filter, bounded_list, bounded_test, json_filter
from millstream_runtime.tokenizing.template_limits import (
    Renders,
    require,
    require_comparable,
    require_text,
    text_characters,
)
from millstream_runtime.tokenizing.template_operations import (
    require_format_spec,
    require_method,
    require_operation,
)

BUFFERED_BYTES = 8  # of a reference to a text
MAX_LOREM_WORDS = 1 << 20
LONGEST_DATE_FACTOR = 256  # of `strftime`, for one character of its format


class RefusedByTemplate(jinja2.TemplateError):
    """The template called `raise_exception`: its message is meant for the caller."""


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Every operation counts against the budget of the render that runs in this thread (`renders.budget`)."""

    intercepted_binops = frozenset({"+", "-", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self.code_generator_class = TemplateCompiler
        self.renders = Renders()
        self.finalize = _finalize
        self.filters["tojson"] = json_filter(self.renders)
        tests: Mapping[str, Any] = self.tests
        self.filters = {name: bounded_filter(name, one, self.renders) for name, one in self.filters.items()}
        self.tests = {name: bounded_test(name, one) for name, one in tests.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _PlainNamespace
        self.globals["lipsum"] = _lorem_ipsum

    def check_time(self) -> None:
        self.renders.budget.check_time()

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.renders.budget
        budget.check_time()
        require_operation(operator, left, right)
        result = self.binop_table[operator](left, right)
        budget.charge_value(result)
        return result

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = __self.renders.budget
        budget.check_time()
        if isinstance(__obj, jinja2.runtime.Macro):
            return super().call(__context, __obj, *args, **kwargs)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if name == "join" and isinstance(owner, str | bytes) and args and isinstance(args[0], Iterator):
            args = (bounded_list(args[0], budget), *args[1:])
        if owner is not None or __obj is dict:
            require_method(budget, __obj, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if name != "get":  # what a mapping holds was there before
            budget.charge_value(result)
        if isinstance(owner, str | bytes) and isinstance(result, list | tuple):
            for part in result:
                budget.charge_value(part)
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            require_comparable(argument)  # is hashed
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template, is_map = value.__self__, value.__name__ == "format_map"

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
        require_text(sum(text_characters(part) for part in parts))
        text = join(parts)
        self.renders.budget.charge_value(text)
        return text

    def made(self, value: Any) -> Any:
        """A literal or a slice."""
        self.renders.budget.charge_value(value)
        return value

    def as_key(self, value: Any) -> Any:
        """What is compared or hashed."""
        require_comparable(value)
        return value

    def buffer(self) -> list[str]:
        return _Buffer(self.renders)

    def concat(self, parts: Iterable[str]) -> str:
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
        self._count(text)
        super().append(text)

    def extend(self, texts: Iterable[str]) -> None:
        given = list(texts)
        for text in given:
            self._count(text)
        super().extend(given)

    def _count(self, text: str) -> None:
        self._characters += len(text)
        require_text(self._characters)
        self._renders.budget.charge(BUFFERED_BYTES)

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
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(jinja2.utils.Namespace):
    """Jinja's `namespace` without underscore names, which could reach CPython's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # the same signature trick as Jinja's own
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"A template may not set {name!r} on a namespace.")


@jinja2.pass_context
def _finalize(_context: jinja2.runtime.Context, value: Any) -> Any:
    """What is written, before it is made a text. As it needs the context, Jinja computes nothing while it compiles."""
    if not isinstance(value, str):
        text_characters(value)
    return value


def _raise_exception(message: str) -> NoReturn:
    text_characters(message)
    raise RefusedByTemplate(str(message))


def _strftime_now(format_: str) -> str:
    require_text(LONGEST_DATE_FACTOR * len(format_))
    return datetime.now().strftime(format_)


def _lorem_ipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:  # noqa: A002 - Jinja's own names
    require("words of lipsum", n * max, MAX_LOREM_WORDS)
    return jinja2.utils.generate_lorem_ipsum(n=n, html=html, min=min, max=max)
