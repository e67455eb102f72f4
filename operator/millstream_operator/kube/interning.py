"""Copies of manifests in which equal parts are one object: hash consing (Ershov 1958, Goto 1974) of parsed JSON.

A thousand LLMDeployments have the same probes, security contexts, tolerations and lines of a plan, each parsed
separately. A part is identified by its keys and by the identities of its values, which are shared already, so finding
it costs one look-up at any depth. The table keeps its values alive, so an identity in it is never reused.

The table has two generations; a part that was not met during a whole generation is dropped. Shared parts must never be
changed.
"""

from __future__ import annotations

import sys
from typing import Any

GENERATION = 8192  # parts; some megabytes
# Of the long texts in a generation: the table keeps them alive when nothing else does. Texts are shared without it.
GENERATION_CHARACTERS = 2 << 20
LONG_TEXT = 256  # characters
ENTRY_BYTES = 16  # of a key and its marks


class ManifestInterner:
    """Makes copies of manifests that share equal parts."""

    def __init__(self, generation: int = GENERATION) -> None:
        self._generation = generation
        self._young: dict[Any, Any] = {}
        self._old: dict[Any, Any] = {}
        self._num_characters = 0  # of long texts in the young generation, each as often as it was met
        self.num_bytes = 0  # about: of the JSON of all that was copied

    def copy(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Return a copy whose parts are shared. The whole and its metadata are unique, so they are not looked up."""
        return {
            sys.intern(key): _interned(value) if key == "metadata" else self._part(value)
            for key, value in manifest.items()
        }

    def _part(self, value: Any) -> Any:
        kind = type(value)
        if kind is str:
            self.num_bytes += len(value)
            if len(value) > LONG_TEXT:
                self._num_characters += len(value)
            return sys.intern(value)
        if kind is dict:
            self.num_bytes += ENTRY_BYTES * len(value)
            made = {sys.intern(key): self._part(inner) for key, inner in value.items()}
            return self._one(made, (*made, *map(id, made.values())))
        if kind is list:
            items = [self._part(inner) for inner in value]
            return self._one(items, (None, *map(id, items)))  # None: no dict has such a key
        return self._one(value, (int, value)) if kind is int else value

    def _one(self, made: Any, key: tuple[Any, ...]) -> Any:
        if (known := self._young.get(key)) is not None:
            return known
        known = self._young[key] = self._old.get(key, made)
        if len(self._young) >= self._generation or self._num_characters >= GENERATION_CHARACTERS:
            self._old, self._young, self._num_characters = self._young, {}, 0
        return known


def _interned(value: Any) -> Any:
    """Return a copy whose strings are interned."""
    if isinstance(value, dict):
        return {sys.intern(key): _interned(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_interned(inner) for inner in value]
    return sys.intern(value) if type(value) is str else value
