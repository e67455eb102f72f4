"""The leaf fields of an API type, and where a manifest says them. Paths are as in `field_changes.py`."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from pydantic import BaseModel


def leaves(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Every leaf field of an API type, by its YAML path."""
    for name, field in model.model_fields.items():
        here = f"{path}.{field.alias or name}" if path else field.alias or name
        yield from leaves_of(field.annotation, here)


def leaves_of(annotation: Any, path: str) -> Iterator[str]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from leaves_of(arguments[0], path)
    elif origin in (typing.Union, types.UnionType):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        yield from leaves_of(inner, path)
    elif origin is list:
        yield from leaves_of(arguments[0], f"{path}[]")
    elif origin is dict and arguments[1] is not Any:
        yield from leaves_of(arguments[1], f"{path}{{}}")
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from leaves(annotation, path)
    else:
        assert origin is dict or (isinstance(annotation, type) and issubclass(annotation, (str, int, Enum))), path
        yield path


def place(spec: Any, path: str) -> tuple[Any, str | int]:
    """Parent and key of a path's first occurrence in the full manifest. Parents that are absent are made."""
    steps = re.findall(r"[^.\[\]{}]+|\[\d*\]|\{\}", path)
    candidates: list[Any] = [spec]
    for step, following in zip(steps, [*steps[1:], ""], strict=True):
        if step == "{}":
            return candidates[0], next(iter(candidates[0]))
        if step == "[]" and not following:
            return candidates[0], 0  # the first of plain items
        if step.startswith("["):
            index = step[1:-1]
            candidates = [x for items in candidates for x in ([items[int(index)]] if index else items)]
            continue
        if not following:
            with_it = [candidate for candidate in candidates if step in candidate]
            return (with_it or candidates)[0], step
        candidates = [candidate[step] for candidate in candidates if step in candidate]
    raise AssertionError(path)
