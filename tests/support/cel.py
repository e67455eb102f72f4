"""A small evaluator of CEL, for the subset that `api/rules.py` uses. No library in the lock speaks CEL.

It knows literals, lists, `self`, field selection, `has()`, `! && || == != >= <= > < in + -`, `?:`, items by number, the
functions `size`, `matches`, `startsWith`, the macros `all`, `exists`, `filter` and `map` with a condition,
`duration()`, and `quantity()` with `compareTo`; in a rule about a change also `oldSelf`, and where the rule is asked of
new objects too (`optionalOldSelf`) its `hasValue()` and `value()`. What it
does not know is an error, so a rule beyond the subset fails loudly rather than being half understood. The real
server's verdict is the e2e suite's business; this one is there to hold each rule's two halves together quickly.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from typing import Any

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+)|(?P<string>'(?:[^'\\]|\\.)*')|(?P<name>[A-Za-z_]\w*)|(?P<mark>&&|\|\||[!=<>]=|[-+!<>?:()\[\].,]))"
)
_Thunk = Callable[[Mapping[str, Any]], Any]


class CelError(ValueError):
    """Not in the subset, or an evaluation that the API server would end with an error."""


def evaluate(rule: str, value: Any, old: Any = None) -> Any:
    """The value of a CEL expression, with `self` (and `oldSelf`) bound to plain JSON data."""
    parser = _Parser(rule)
    return parser.whole()({"self": value, "oldSelf": old})


def evaluate_ratchet(rule: str, value: Any, *old: Any) -> Any:
    """As `evaluate`, for a rule with `optionalOldSelf`. `old`: the stored value; without it the object is new."""
    parser = _Parser(rule)
    return parser.whole()({"self": value, "oldSelf": _Optional(old)})


class _Optional(tuple[Any, ...]):
    """CEL's optional type, as far as the rules use it."""

    def value(self) -> Any:
        if not self:
            raise CelError("optional.none() dereference")
        return self[0]


class _Parser:
    """Recursive descent; every method returns a function of the variables, so that `&&` and macros can wait."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(text.rstrip()):
            match = _TOKEN.match(text, position)
            if match is None:
                raise CelError(f"cannot read {text[position : position + 20]!r}")
            self.tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
            position = match.end()
        self.at = 0

    def whole(self) -> _Thunk:
        thunk = self.ternary()
        if self.at != len(self.tokens):
            raise CelError(f"left over: {self.tokens[self.at :]}")
        return thunk

    def ternary(self) -> _Thunk:
        condition = self.either()
        if not self.taken("?"):
            return condition
        then = self.ternary()
        self.expect(":")
        otherwise = self.ternary()
        return lambda v: then(v) if condition(v) else otherwise(v)

    def either(self) -> _Thunk:
        left = self.both()
        while self.taken("||"):
            left = self._or(left, self.both())
        return left

    def both(self) -> _Thunk:
        left = self.comparison()
        while self.taken("&&"):
            left = self._and(left, self.comparison())
        return left

    @staticmethod
    def _or(one: _Thunk, other: _Thunk) -> _Thunk:
        return lambda v: bool(one(v)) or bool(other(v))

    @staticmethod
    def _and(one: _Thunk, other: _Thunk) -> _Thunk:
        return lambda v: bool(one(v)) and bool(other(v))

    def comparison(self) -> _Thunk:
        left = self.sum()
        compare: dict[str, Callable[[Any, Any], bool]] = {
            "==": lambda a, b: a == b,
            "!=": lambda a, b: a != b,
            ">=": lambda a, b: a >= b,
            "<=": lambda a, b: a <= b,
            ">": lambda a, b: a > b,
            "<": lambda a, b: a < b,
        }
        for mark, test in compare.items():
            if self.taken(mark):
                right = self.sum()
                return lambda v: test(left(v), right(v))
        if self.taken("in", "name"):
            right = self.sum()
            return lambda v: left(v) in right(v)
        return left

    def sum(self) -> _Thunk:
        left = self.unary()
        while (plus := self.taken("+")) or self.taken("-"):
            left = self._plus(left, self.unary()) if plus else self._minus(left, self.unary())
        return left

    @staticmethod
    def _minus(one: _Thunk, other: _Thunk) -> _Thunk:
        return lambda v: one(v) - other(v)

    @staticmethod
    def _plus(one: _Thunk, other: _Thunk) -> _Thunk:
        return lambda v: one(v) + other(v)

    def unary(self) -> _Thunk:
        if self.taken("!"):
            operand = self.unary()
            return lambda v: not operand(v)
        return self.postfix(self.primary())

    def primary(self) -> _Thunk:
        kind, text = self.next()
        if kind == "number":
            return lambda v: int(text)
        if kind == "string":
            literal = text[1:-1].replace("\\\\", "\\").replace("\\'", "'")
            return lambda v: literal
        if text == "(":
            inner = self.ternary()
            self.expect(")")
            return inner
        if text == "[":
            items = self.arguments("]")
            return lambda v: [item(v) for item in items]
        if kind == "name" and text == "has":
            return self.has()
        if kind == "name" and text == "duration":
            self.expect("(")
            (argument,) = self.arguments(")")
            return lambda v: _duration(argument(v))
        if kind == "name" and text == "quantity":
            self.expect("(")
            (argument,) = self.arguments(")")
            return lambda v: _quantity(argument(v))
        if kind == "name" and text == "size":
            self.expect("(")
            (argument,) = self.arguments(")")
            return lambda v: len(argument(v))
        if kind == "name":
            return lambda v: v[text]
        raise CelError(f"unexpected {text!r}")

    def has(self) -> _Thunk:
        """`has(a.b.c)`: is field c there? That a.b is not there is an error, as in CEL."""
        self.expect("(")
        value, name = self.primary(), ""
        while self.taken("."):
            value = self.select(value, name) if name else value
            name = self.name()
            if self.taken("("):
                value, name = self.call(value, name), ""
        self.expect(")")
        if not name:
            raise CelError("has() needs a field")
        return lambda v: name in value(v)

    def postfix(self, value: _Thunk) -> _Thunk:
        while True:
            if self.taken("."):
                name = self.name()
                value = self.call(value, name) if self.taken("(") else self.select(value, name)
            elif self.taken("["):
                (number,) = self.arguments("]")
                value = self._item(value, number)
            else:
                return value

    @staticmethod
    def _item(value: _Thunk, number: _Thunk) -> _Thunk:
        return lambda v: value(v)[number(v)]

    @staticmethod
    def select(value: _Thunk, name: str) -> _Thunk:
        return lambda v: _field(value(v), name)

    def call(self, value: _Thunk, name: str) -> _Thunk:
        if name in ("all", "exists", "filter", "map"):
            return self.macro(value, name)
        arguments = self.arguments(")")
        functions: dict[str, Callable[..., Any]] = {
            "size": len,
            "matches": lambda text, pattern: re.search(pattern, text) is not None,
            "startsWith": str.startswith,
            "hasValue": bool,
            "value": _Optional.value,
            "compareTo": lambda one, other: (one > other) - (one < other),
        }
        if name not in functions:
            raise CelError(f"unknown function {name}")
        return lambda v: functions[name](value(v), *(argument(v) for argument in arguments))

    def macro(self, value: _Thunk, name: str) -> _Thunk:
        variable = self.name()
        self.expect(",")
        body = self.ternary()
        if name == "map":
            self.expect(",")
            item_of = self.ternary()
            self.expect(")")
            return lambda v: [item_of({**v, variable: item}) for item in value(v) if body({**v, variable: item})]
        self.expect(")")
        if name == "filter":
            return lambda v: [item for item in value(v) if body({**v, variable: item})]
        over = all if name == "all" else any
        return lambda v: over(bool(body({**v, variable: item})) for item in value(v))

    def arguments(self, end: str) -> list[_Thunk]:
        found: list[_Thunk] = []
        while not self.taken(end):
            if found:
                self.expect(",")
            found.append(self.ternary())
        return found

    def next(self) -> tuple[str, str]:
        if self.at == len(self.tokens):
            raise CelError("the expression ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

    def name(self) -> str:
        kind, text = self.next()
        if kind != "name":
            raise CelError(f"{text!r} is no name")
        return text

    def taken(self, text: str, kind: str = "mark") -> bool:
        if self.at < len(self.tokens) and self.tokens[self.at] == (kind, text):
            self.at += 1
            return True
        return False

    def expect(self, mark: str) -> None:
        if not self.taken(mark):
            raise CelError(f"expected {mark!r} at {self.tokens[self.at : self.at + 3]}")


def _field(value: Any, name: str) -> Any:
    if not isinstance(value, dict) or name not in value:
        raise CelError(f"no such key: {name}")
    return value[name]


def _duration(text: str) -> datetime.timedelta:
    """Go's time.ParseDuration, for hours, minutes, seconds and milliseconds."""
    if not re.fullmatch(r"([0-9]+(ms|[hms]))+", text):
        raise CelError(f"no duration: {text}")
    unit = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
    return datetime.timedelta(milliseconds=sum(int(n) * unit[u] for n, u in re.findall(r"([0-9]+)(ms|[hms])", text)))


def _quantity(text: str) -> int:
    """resource.ParseQuantity, for whole numbers with a suffix from k or Ki on."""
    match = re.fullmatch(r"([0-9]+)(?:([kMGTPE])|([KMGTPE])i)?", text)
    if match is None:
        raise CelError(f"no quantity: {text}")
    power = "kMGTPE".find(match[2]) + 1 if match[2] else "KMGTPE".find(match[3]) + 1 if match[3] else 0
    scale: int = (1000 if match[2] else 1024) ** power
    return int(match[1]) * scale
