"""Content addresses: the name of a built thing is the hash of everything that goes into it.

So a thing is built once per machine, two clones share it, and nothing stale can be picked up: a changed input has
another name. Timestamps, owners and absolute paths never enter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

ADDRESS_LENGTH = 16  # hex digits: 64 bits, far beyond any accident among a few dozen names


def address_of(inputs: Mapping[str, bytes | str]) -> str:
    """The address of named inputs, in any order. Lengths are hashed too, so `{"a": "bc"}` is not `{"ab": "c"}`."""
    digest = hashlib.sha256()
    for name in sorted(inputs):
        value = inputs[name]
        data = value.encode() if isinstance(value, str) else value
        digest.update(f"{len(name)}:{name}={len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()[:ADDRESS_LENGTH]


def files_under(folder: Path, names: Iterable[str] | None = None) -> dict[str, bytes]:
    """Every regular file below `folder` (or only `names`), keyed by its POSIX path relative to it, with its mode bit.

    The executable bit is part of the key's value: a script that loses it is another input.
    """
    chosen = [folder / name for name in names] if names is not None else sorted(folder.rglob("*"))
    found: dict[str, bytes] = {}
    for path in chosen:
        if path.is_file() and "__pycache__" not in path.parts:
            executable = b"x" if path.stat().st_mode & 0o100 else b"-"
            found[path.relative_to(folder).as_posix()] = executable + path.read_bytes()
    return found
