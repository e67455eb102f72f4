"""Kubernetes quantities: how much they are, and the form in which the API server stores them.

The server rewrites `0.5` as `500m` and `1024Mi` as `1Gi`. What we render must already look so, or every comparison
with the live object would see a difference. The rules are those of `resource.Quantity.CanonicalizeBytes`.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

_DECIMAL = {"n": -3, "u": -2, "m": -1, "": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)")


def canonical(quantity: str) -> str:
    """`0.5` -> `500m`, `1024Mi` -> `1Gi`, `1.5Gi` -> `1536Mi`.

    Raises:
        ValueError: not a quantity.
    """
    number, suffix = _parts(quantity)
    if suffix in _BINARY:
        whole = math.ceil(number * 1024 ** _BINARY[suffix])
        return _with_suffix(Fraction(whole), 1024, _BINARY) if whole >= 1024 else _decimal(Fraction(whole))
    return _decimal(number * Fraction(1000) ** _DECIMAL[suffix])


def amount(quantity: str) -> Fraction:
    """`500m` -> 1/2, `1Gi` -> 1073741824.

    Raises:
        ValueError: not a quantity.
    """
    number, suffix = _parts(quantity)
    return number * (Fraction(1024) ** _BINARY[suffix] if suffix in _BINARY else Fraction(1000) ** _DECIMAL[suffix])


def _parts(quantity: str) -> tuple[Fraction, str]:
    match = _QUANTITY.fullmatch(quantity)
    if match is None or (match[2] not in _DECIMAL and match[2] not in _BINARY):
        raise ValueError(f"{quantity!r} is not a quantity")
    return Fraction(match[1]), match[2]


def _decimal(value: Fraction) -> str:
    nano = math.ceil(value * 10**9)  # nothing smaller exists
    return _with_suffix(Fraction(nano, 10**9), 1000, _DECIMAL)


def _with_suffix(value: Fraction, base: int, suffixes: dict[str, int]) -> str:
    """The largest suffix that leaves a whole number."""
    if value == 0:
        return "0"
    for suffix, power in sorted(suffixes.items(), key=lambda item: -item[1]):
        scaled = value / Fraction(base) ** power
        if scaled.denominator == 1:
            return f"{scaled.numerator}{suffix}"
    return str(value.numerator)  # a binary amount that is no multiple of 1024
