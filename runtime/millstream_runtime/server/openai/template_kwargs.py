"""`chat_template_kwargs`: variables that a client gives to the model's chat template.

    {"enable_thinking": false}    the template sees `enable_thinking` as false

They are plain JSON, and capped: a template may walk through them, repeat text as often as a number says, or print them
into the prompt. What the server itself gives to the template cannot be given.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from millstream_runtime.server.http import limits
from millstream_runtime.server.openai.request_fields import require_encodable
from millstream_runtime.tokenizing.chat_template import RESERVED_VARIABLES

NAME_PATTERN = rf"^[A-Za-z][A-Za-z0-9_]{{0,{limits.MAX_TEMPLATE_NAME_CHARACTERS - 1}}}$"
_NAME = re.compile(NAME_PATTERN)
_LARGEST = limits.MAX_TEMPLATE_NUMBER


def checked_kwargs(given: Any) -> Any:
    """Return `given`, checked; what is no object is left to the type.

    Raises:
        PydanticCustomError: a name that is the server's or that no template could use, or more than the caps allow.
    """
    if not isinstance(given, dict):
        return given
    if len(given) > limits.MAX_TEMPLATE_KWARGS:
        raise _invalid("it has {count} names; at most {most} are taken", len(given), limits.MAX_TEMPLATE_KWARGS)
    for name in given:
        if name in RESERVED_VARIABLES:
            raise PydanticCustomError(
                "conflicting_parameters",
                "'chat_template_kwargs.{param}' is what the server itself gives to the chat template; leave it out.",
                {"param": name},
            )
        if not _NAME.fullmatch(name):
            raise PydanticCustomError(
                "invalid_value",
                "every name must be a letter and up to {most} letters, digits and underscores",
                {"most": limits.MAX_TEMPLATE_NAME_CHARACTERS - 1},
            )
    _check_size(given)
    return given


def _check_size(given: dict[str, Any]) -> None:
    """Without recursion: what is nested deeper than Python can go down arrives here, too."""
    left: list[tuple[Any, int]] = [(given, 0)]
    num_values = characters = 0
    while left:
        value, depth = left.pop()
        if isinstance(value, dict | list):
            if depth >= limits.MAX_TEMPLATE_DEPTH:
                raise _invalid("it is nested deeper than {most} levels", depth, limits.MAX_TEMPLATE_DEPTH)
            num_values += len(value)
            characters += sum(_characters(name) for name in value) if isinstance(value, dict) else 0
            if num_values > limits.MAX_TEMPLATE_VALUES:
                raise _invalid("it has more than {most} values", num_values, limits.MAX_TEMPLATE_VALUES)
            left += [(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, str):
            characters += _characters(value)
        elif isinstance(value, int | float) and not -_LARGEST <= value <= _LARGEST:  # NaN is in no range
            raise _invalid("every number must be from -{most} to {most}", 1, _LARGEST)
        if characters > limits.MAX_TEMPLATE_CHARACTERS:
            raise _invalid("its texts and names have more than {most} characters", 1, limits.MAX_TEMPLATE_CHARACTERS)


def _characters(text: str) -> int:
    return len(require_encodable(text))


def _invalid(message: str, count: int, most: int) -> PydanticCustomError:
    return PydanticCustomError("invalid_value", message, {"count": count, "most": most})


TEMPLATE_KWARGS_SCHEMA = {
    "type": "object",
    "description": "variables of the model's chat template, such as enable_thinking; none that the server sets itself, "
    f"at most {limits.MAX_TEMPLATE_VALUES} values in {limits.MAX_TEMPLATE_DEPTH} levels with "
    f"{limits.MAX_TEMPLATE_CHARACTERS} characters, and numbers up to {limits.MAX_TEMPLATE_NUMBER}",
    "propertyNames": {"pattern": NAME_PATTERN, "not": {"enum": sorted(RESERVED_VARIABLES)}},
    "maxProperties": limits.MAX_TEMPLATE_KWARGS,
    "additionalProperties": True,
}
TemplateKwargs = Annotated[dict[str, Any], BeforeValidator(checked_kwargs), WithJsonSchema(TEMPLATE_KWARGS_SCHEMA)]
