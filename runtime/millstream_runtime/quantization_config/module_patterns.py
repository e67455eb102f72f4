"""Which modules a `quantization_config` means: its lists name them whole, in part, or by a pattern. No torch.

    "lm_head", "model.layers.0.mlp"     this module, or all within it: whole words between dots, anywhere in a name
    "re:.*self_attn.*"                  compressed-tensors: from the start of a name
    "Linear", "*"                       every linear layer

A pattern is never run as a regular expression: the file is untrusted, and a pattern can take years. Literals, `.*`,
`\\d+`, `[0-9]+`, `^`, `$` and `(a|b)` are read; anything else is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

EVERYTHING = ("Linear", "*", "re:.*")
MAX_PATTERNS, MAX_PATTERN_LENGTH, MAX_ALTERNATIVES = 4096, 200, 64
# What a model with a vision tower puts before the names of its language model: (as stored, as a model without one).
_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
_GROUP = re.compile(r"\((?:\?:)?([A-Za-z0-9_.|]*)\)")


def is_named(module: str, patterns: Sequence[str]) -> bool:
    """Whether one of `patterns`, each readable by `unreadable`, means `module`, a name such as `model.layers.0.mlp`."""
    return any(_matches(module, pattern) for pattern in patterns)


def unreadable(patterns: Sequence[str]) -> str | None:
    """Return the first pattern that is not read, shortened; None where all are."""
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN_LENGTH or _globs(pattern) is None:
            return pattern[:80]
    return None


def _matches(module: str, pattern: str) -> bool:
    if pattern in EVERYTHING:
        return True
    if pattern.startswith("re:"):
        names = [module, *(stored + module.removeprefix(plain) for stored, plain in _PREFIXES)]
        return any(fnmatchcase(name, glob) for glob in _globs(pattern) or () for name in names)
    for stored, plain in _PREFIXES:
        if pattern.startswith(stored):
            pattern = plain + pattern.removeprefix(stored)
            break
    return f".{pattern}." in f".{module}."


def _globs(pattern: str) -> list[str] | None:
    """A pattern as shell patterns; None where it is a regular expression of another form."""
    if not pattern.startswith("re:"):
        return [pattern]
    regex = pattern.removeprefix("re:").removeprefix("^")
    ends, regex = regex.endswith("$"), regex.removesuffix("$")
    regex = regex.replace(r"\d+", "*").replace("[0-9]+", "*").replace(r"\.", ".").replace(".*", "*")
    if math.prod(len(group.split("|")) for group in _GROUP.findall(regex)) > MAX_ALTERNATIVES:
        return None
    found = _expanded(regex)
    if not all(re.fullmatch(r"[A-Za-z0-9_.*]*", one) for one in found):
        return None
    return [re.sub(r"\*+", "*", one if ends else f"{one}*") for one in found]


def _expanded(regex: str) -> list[str]:
    """`a(b|c)` -> `ab`, `ac`."""
    if (group := _GROUP.search(regex)) is None:
        return [regex]
    before, after = regex[: group.start()], regex[group.end() :]
    return [one for choice in group[1].split("|") for one in _expanded(f"{before}{choice}{after}")]
