"""Read an LLMDeployment as the API server stores it, also where a newer version of the API wrote it.

A CRD outlives a downgrade of the operator, so a stored object may have fields that this version does not know. They are
left out and named: an object that serves must not become invalid by them. All else is checked as in a file.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import ManifestError, parse

Manifest = dict[str, Any]
MAX_NAMED = 8  # in a message


@dataclass(frozen=True, slots=True)
class UnknownField:
    """A field of the spec that this version does not know, and its value."""

    path: tuple[str | int, ...]
    value: Any

    def __str__(self) -> str:
        text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path)
        return text.removeprefix(".")


def parse_stored(manifest: Manifest) -> tuple[LLMDeployment, tuple[UnknownField, ...]]:
    """Return the object without the fields that are not known here, and those of its spec.

    Raises:
        ManifestError: it is not valid without them either; the sentence is of the object as it is stored.
    """
    try:
        return parse(manifest), ()
    except ManifestError as error:
        unknown = [*_unknown(manifest)]
        if not unknown:
            raise
        known = copy.deepcopy(manifest)
        for field in unknown:
            del _parent(known, field.path)[field.path[-1]]
        try:
            return parse(known), tuple(field for field in unknown if field.path[0] == "spec")
        except ManifestError:
            raise error from None


def in_words(fields: tuple[UnknownField, ...]) -> str:
    """Return what a condition says of them."""
    names = ", ".join(str(field) for field in fields[:MAX_NAMED])
    more = f" and {len(fields) - MAX_NAMED} more" if len(fields) > MAX_NAMED else ""
    return (
        f"This version of the operator does not know {names}{more}, and ignores what it does not know. Upgrade the "
        "operator, or remove it from the spec."
    )


def _unknown(manifest: Manifest) -> Iterator[UnknownField]:
    try:
        LLMDeployment.model_validate_json(json.dumps(manifest), by_alias=True, by_name=False)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            if one["type"] == "extra_forbidden":
                yield UnknownField(one["loc"], one["input"])


def _parent(manifest: Manifest, path: tuple[str | int, ...]) -> Any:
    found: Any = manifest
    for step in path[:-1]:
        found = found[step]
    return found
