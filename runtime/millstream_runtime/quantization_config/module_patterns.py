"""Which modules a `quantization_config` means: its lists name them whole, in part, or by a pattern. No torch.

    "lm_head", "model.layers.0.mlp"     this module, or all within it: whole words between dots, anywhere in a name
    "model.layers.*.mlp"                the same with anything for the star
    "re:.*self_attn.*"                  compressed-tensors: from the start of a name
    "Linear", "*"                       every linear layer

The planner and the runtime both match by `globs_of` and `matches`. A pattern is never run as a regular expression: the
file is untrusted, and a pattern can take years. Literals, `.*`, `\\d+`, `[0-9]+`, `^`, `$` and `(a|b)` are read;
anything else is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache

EVERYTHING = ("Linear", "*", "re:.*")
MAX_PATTERNS, MAX_PATTERN_LENGTH, MAX_ALTERNATIVES = 4096, 200, 64
# What a model with a vision tower puts before the names of its language model: (as stored, as a model without one).
_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
_GROUP = re.compile(r"\((?:\?:)?([A-Za-z0-9_.|]*)\)")


def is_named(module: str, patterns: Sequence[str]) -> bool:
    """Whether one of `patterns`, each readable by `unreadable`, means `module`, a name such as `model.layers.0.mlp`."""
    return any(matches(module, glob) for pattern in patterns for glob in globs_of(pattern) or ())


def unreadable(patterns: Sequence[str]) -> str | None:
    """Return the first pattern that is not read, shortened; None where all are."""
    return next((pattern[:80] for pattern in patterns if globs_of(pattern) is None), None)


@lru_cache(maxsize=MAX_PATTERNS)
def globs_of(pattern: str) -> tuple[str, ...] | None:
    """A pattern as globs for `matches`, in which only the star is special; None where it is not read."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        return None
    if pattern in EVERYTHING:
        return ("*",)
    if not pattern.startswith("re:"):
        words = pattern.strip(".")
        return (f"*.{words}.*",) if words else ()
    regex = pattern.removeprefix("re:").removeprefix("^")
    ends, regex = regex.endswith("$"), regex.removesuffix("$")
    regex = regex.replace(r"\d+", "*").replace("[0-9]+", "*").replace(r"\.", ".").replace(".*", "*")
    if math.prod(len(group.split("|")) for group in _GROUP.findall(regex)) > MAX_ALTERNATIVES:
        return None
    found = _expanded(regex)
    if not all(re.fullmatch(r"[A-Za-z0-9_.*]*", one) for one in found):
        return None
    return tuple(re.sub(r"\*+", "*", f".{one}." if ends else f".{one}*.") for one in found)


def matches(module: str, glob: str) -> bool:
    """Whether a glob of `globs_of` means `module`, by its name here or in a model with a vision tower."""
    if glob == "*":
        return True
    names = [module, *(stored + module.removeprefix(plain) for stored, plain in _PREFIXES)]
    return any(_fits(f".{name}.", glob) for name in names)


def _fits(name: str, glob: str) -> bool:
    """As fnmatch, without a regular expression: what stands between stars is searched from left to right."""
    first, *rest = glob.split("*")
    if not rest:
        return name == first
    *middle, last = rest
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    start, end = len(first), len(name) - len(last)
    for piece in middle:
        found = name.find(piece, start, end)
        if found < 0:
            return False
        start = found + len(piece)
    return True


def _expanded(regex: str) -> list[str]:
    """`a(b|c)` -> `ab`, `ac`."""
    if (group := _GROUP.search(regex)) is None:
        return [regex]
    before, after = regex[: group.start()], regex[group.end() :]
    return [one for choice in group[1].split("|") for one in _expanded(f"{before}{choice}{after}")]
