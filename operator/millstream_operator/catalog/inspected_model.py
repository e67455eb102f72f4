"""Read the output of `millstream inspect`: the facts that planning and pinning need of a model.

The contract is docs/model-sources.md: one JSON object with a `version`. An unknown version is
refused, and unknown keys are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from millstream_operator.catalog.checkpoint_size import read_weights, size_problem
from millstream_operator.catalog.config_fields import CURE, ConfigError
from millstream_operator.catalog.config_ranges import RANGES
from millstream_operator.catalog.draft_head import read_head, refuse_head
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.catalog.read_shape import has_tower, read_shape
from millstream_runtime.config_json_fields import problem_with_unread
from millstream_runtime.model_families import STATED_IN_INSPECTIONS
from millstream_runtime.strict_json import read_strict_json

VERSION = 1
MAX_NAME_LENGTH = 128  # of a file, in a message
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._/+-]{0,127}")


class UnknownAnswerError(ValueError):
    """Not the answer of an inspection, or of a version that is not known here. `str()` is one sentence."""


@dataclass(frozen=True, slots=True)
class InspectedModel:
    """`revision`: commit or manifest digest; None for a folder. `checkpoint_bytes`: of the weights files."""

    shape: ModelShape
    revision: str | None
    checkpoint_bytes: int | None


def read_answer(text: str) -> dict[str, Any]:
    """Return the JSON object in an inspection's termination message.

    Raises:
        UnknownAnswerError: it is none.
    """
    try:
        answer = read_strict_json(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or answer.get("version") != VERSION or not isinstance(answer.get("config"), dict):
        raise UnknownAnswerError(
            f"The runtime image answered the inspection in a form that this operator does not read (version {VERSION} "
            "is what it reads); use an image of the operator's own version."
        )
    return answer


def read_inspected(answer: Mapping[str, Any]) -> InspectedModel:
    """Return the facts in an answer.

    Raises:
        ConfigError: no shape can be read from it, or its weights files do not have that shape; UnsupportedModelError
            for a family or a format of weights that the catalogue does not know.
    """
    _refuse_numbers_left_out(answer)
    refuse_head(answer)
    _refuse_unread_fields(answer)
    nulls = dict.fromkeys(STATED_IN_INSPECTIONS)  # what an inspection leaves out is null in config.json
    config = {**nulls, **answer["config"], "quantization_config": answer.get("quantization_config")}
    shape = _with_stored_head(read_shape(config), answer)
    counted = read_weights(_weights(answer))
    # A model with a vision tower has weights beside those of its language model.
    if counted is not None and (problem := size_problem(shape, counted, is_part=has_tower(config))) is not None:
        raise ConfigError(problem)
    is_gguf, left_out = _weights(answer).get("format") == "gguf", _weights(answer).get("gguf_left_out")
    name = left_out if isinstance(left_out, str) and left_out.isprintable() else ""
    return _pinned(replace(shape, is_gguf=is_gguf, gguf_left_out=name[:MAX_NAME_LENGTH]), answer)


def _refuse_unread_fields(answer: Mapping[str, Any]) -> None:
    """Refuse what the next boot would refuse. Inspections of earlier releases name no such fields."""
    unread = answer.get("unread_fields")
    if isinstance(unread, list) and unread:
        raise ConfigError(f"config.json: {problem_with_unread([str(name) for name in unread])}")


def _with_stored_head(shape: ModelShape, answer: Mapping[str, Any]) -> ModelShape:
    """Count a stored head that config.json ties to the embedding: headers do not say whether its numbers differ.

    Inspections of earlier releases do not say it, so their plans stay.
    """
    parameters = shape.parameters
    if _weights(answer).get("stored_lm_head") is not True or parameters.head:
        return shape
    return replace(shape, parameters=replace(parameters, head=parameters.embedding))


def read_inspected_head(answer: Mapping[str, Any], method: str) -> InspectedModel:
    """Return the facts in an answer about a draft head. `method`: EAGLE or Medusa.

    Raises:
        ConfigError: as `draft_head.read_head`.
    """
    return _pinned(read_head(answer, method), answer)


def _weights(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    weights = answer.get("weights")
    return weights if isinstance(weights, Mapping) else {}


def _pinned(shape: ModelShape, answer: Mapping[str, Any]) -> InspectedModel:
    size = _weights(answer).get("file_bytes")
    revision = answer.get("revision")
    return InspectedModel(
        shape,
        revision if isinstance(revision, str) and _REVISION.fullmatch(revision) else None,
        size if isinstance(size, int) and 0 < size < 1 << 60 else None,
    )


def _refuse_numbers_left_out(answer: Mapping[str, Any]) -> None:
    """A number that did not fit into the answer is not absent: it has a value that nobody has checked."""
    omitted = answer.get("omitted")
    for path in omitted if isinstance(omitted, list) else ():
        _, _, field = str(path).partition(".")
        if field.rpartition(".")[2] in RANGES:
            raise ConfigError(
                f"config.json: {field[:60]} was left out of the inspection's answer, because other fields are too long "
                f"for it. {CURE}"
            )
