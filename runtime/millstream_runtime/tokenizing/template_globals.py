"""The functions and types that every chat template may name: `namespace`, `dict`, `strftime_now`, `raise_exception`, ….

They are those of Jinja and of `transformers`, without what would reach CPython's internals or make too much.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.utils

from millstream_runtime.tokenizing.template_limits import (
    Renders,
    is_last_reference,
    require,
    require_text,
    text_characters,
)
from millstream_runtime.tokenizing.template_operations import require_keys

MAX_LOREM_WORDS = 1 << 20
LONGEST_DATE_FACTOR = 256  # of `strftime`, for one character of its format


class RefusedByTemplate(jinja2.TemplateError):
    """The template called `raise_exception`: its message is meant for the caller."""


def template_globals(renders: Renders) -> Mapping[str, Callable[..., Any]]:
    """Functions and types by the name that templates give them. `renders`: whose budget counts what they make."""
    return {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _namespace_type(renders),
        "dict": _Dictionaries(),
        "lipsum": _lorem_ipsum,
    }


def _namespace_type(renders: Renders) -> type[jinja2.utils.Namespace]:
    class PlainNamespace(jinja2.utils.Namespace):
        """Jinja's `namespace` without underscore names, which could reach CPython's internals.

        A template that adds every message to a text in a namespace makes that text anew each time. The one before is
        freed, and does not count any longer.
        """

        def __init__(*args: Any, **kwargs: Any) -> None:  # the same signature trick as Jinja's own
            self, rest = args[0], args[1:]
            for given in rest:
                require_keys(given)
            attributes = dict(*rest, **kwargs)
            for name in attributes:
                _refuse_underscore(name)
            renders.budget.charge_value(attributes)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_underscore(name)
            before = object.__getattribute__(self, "_Namespace__attrs").get(name)
            if is_last_reference(sys.getrefcount(before) - 1, before):  # besides the namespace's
                renders.budget.give_back(before)
            super().__setitem__(name, value)

    return PlainNamespace


class _Dictionaries:
    """`dict` in a template: what it makes, without the methods of the type, which would change a given dictionary."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        for given in args:
            require_keys(given)
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        require_keys(keys)
        return dict.fromkeys(keys, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"A template may not set {name!r} on a namespace.")


def _raise_exception(message: str) -> NoReturn:
    text_characters(message)
    raise RefusedByTemplate(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 - the name that `transformers` gives it
    require_text(LONGEST_DATE_FACTOR * len(format))
    return datetime.now().strftime(format)


def _lorem_ipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:  # noqa: A002 - Jinja's own names
    for words in (n, max, n * max):
        require("words of lipsum", words, MAX_LOREM_WORDS)
    return jinja2.utils.generate_lorem_ipsum(n=n, html=html, min=min, max=max)
