"""Read API keys from the bytes of a file: one per line, `#` begins a comment. Pure. No problem ever shows a key.

A key that is followed by `rank=above` ranks above the keys without it: `scheduling/fair_queue.py` says what that means.

Spaces and tabs around a key, empty lines, a byte order mark and both kinds of line ends do not matter: editors and
`kubectl create secret --from-file` leave them. White space inside a key, or what no header carries, makes that line
unusable, and the other keys stay valid.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass

MAX_KEYS = 1000  # each request is compared with all of them
MAX_KEY_CHARACTERS = 512
MAX_NAMED_PROBLEMS = 3
RANK, ABOVE = b"rank=", b"rank=above"


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The usable keys, and what is wrong with the others: one clause per line of the file."""

    keys: tuple[bytes, ...]
    problems: tuple[str, ...]
    above: frozenset[bytes] = frozenset()  # those of the keys that rank above the others

    @property
    def problem(self) -> str:
        """Return the problems in one clause; empty where there is none."""
        named = "; ".join(self.problems[:MAX_NAMED_PROBLEMS])
        more = len(self.problems) - MAX_NAMED_PROBLEMS
        return f"{named}; and {more} more" if more > 0 else named


def read_keys(content: bytes) -> KeyFile:
    """Return the keys of a file."""
    keys, problems, above = [], [], set()
    for number, line in _lines(content):
        key, words = line, line.split()
        if len(words) == 2 and words[1] == ABOVE:
            key = words[0]
            above.add(key)
        elif len(words) == 2 and words[1].startswith(RANK):
            problems.append(f"line {number}: the rank of a key is rank=above; write that behind the key, or nothing")
            continue
        if (problem := _problem(key)) is None:
            keys.append(key)
        else:
            problems.append(f"line {number}: {problem}")
    return KeyFile(tuple(keys), tuple(problems), frozenset(above))


def _lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The lines that are meant as keys, with their numbers."""
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).splitlines(), start=1):
        key = line.strip(b" \t")
        if key and not key.startswith(b"#"):
            yield number, key


def _problem(key: bytes) -> str | None:
    if len(key) > MAX_KEY_CHARACTERS:
        return f"a key has at most {MAX_KEY_CHARACTERS} characters"
    if b" " in key or b"\t" in key:
        return "white space inside the key; write one key per line"
    if not all(33 <= byte <= 126 for byte in key):
        return "a character that is not printable ASCII, which no header carries"
    return None
