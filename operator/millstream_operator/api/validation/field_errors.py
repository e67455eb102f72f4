"""Errors of Pydantic as sentences that name the field, what stands there and what may stand there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from millstream_operator.api.validation.field_hints import KEY_HINT, QUANTITIES, is_required, meant_field, wanted

Location = tuple[int | str, ...]
LENGTHS = {
    "too_short": ("min_length", "item"),
    "too_long": ("max_length", "item"),
    "string_too_short": ("min_length", "character"),
    "string_too_long": ("max_length", "character"),
}
LONGEST_SHOWN = 80


@dataclass(frozen=True, slots=True)
class FieldError:
    """One error. `location`: of the field, without the steps that Pydantic adds."""

    location: Location
    details: ErrorDetails

    @property
    def is_unknown_field(self) -> bool:
        return self.details["type"] == "extra_forbidden"

    def sentence(self, hint: str = "") -> str:
        """Return what is wrong. `hint`: what is added where the field is unknown."""
        name = dotted(self.location) or "the object"
        kind, context = self.details["type"], self.details.get("ctx", {})
        shown, field = shown_value(self.details["input"]), str(self.location[-1]) if self.location else ""
        if self.is_unknown_field:
            return f"{name}: unknown field{hint}."
        if kind == "missing":
            return f"{name}: missing; it is required."
        if kind in ("json_invalid", "value_error"):
            words = self.details["msg"].removeprefix("Value error, ")
            return f"{name}: {words}." if self.location else f"{words}."
        if self.details["loc"][-1:] == ("[key]",):
            return f"{dotted(self.location[:-1])}: the key {shown} must be {KEY_HINT}."
        if self.details["input"] is None:
            return f"{name} is empty; give it a value{'' if is_required(self.location) else ' or leave it out'}."
        if length := _length(kind, context):
            return f"{name} is {shown}; it must have {length}."
        return f"{name} is {shown}; it must be {wanted(self.details, field, context)}."


def field_errors(error: ValidationError) -> list[FieldError]:
    """Return all errors, unknown fields first, but for those that another one causes.

    A misspelled required field is both unknown and missing, and the spelling is the cause.
    """
    errors = [FieldError(_schema_location(details["loc"]), details) for details in error.errors(include_url=False)]
    errors.sort(key=lambda error: not error.is_unknown_field)
    unknown = [error.location for error in errors if error.is_unknown_field]
    meant = {(*location[:-1], meant_field(location)) for location in unknown}
    return [error for error in errors if error.details["type"] != "missing" or error.location not in meant]


def field_error(error: ValidationError) -> FieldError:
    """Return the error that a person should read first."""
    return field_errors(error)[0]


def dotted(location: Location) -> str:
    """Return a location as it is written in messages: spec.x[0].y."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return text.removeprefix(".")


def _schema_location(location: Location) -> Location:
    """Drop the last step that Pydantic adds for the branch of a quantity and for a map's key."""
    ours = location[-1:] == ("[key]",) or (location[-1:] in (("number",), ("text",)) and location[-2] in QUANTITIES)
    return location[:-1] if ours else location


def shown_value(value: Any) -> str:
    """Return a value as JSON, of at most LONGEST_SHOWN characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def _length(kind: str, context: dict[str, Any]) -> str:
    """`at most 8 items`; empty for an error that is not about a length."""
    if kind not in LENGTHS:
        return ""
    limit, noun = LENGTHS[kind]
    number = context[limit]
    return f"at {'least' if limit == 'min_length' else 'most'} {number} {noun}{'' if number == 1 else 's'}"
