"""Shapes of well-known Hugging Face repositories: planning without a network.

"meta-llama/Llama-3.1-70B-Instruct" -> known_models.yaml -> ModelShape
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import yaml

from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.catalog.read_shape import read_shape


def known_shape(repository: str) -> ModelShape | None:
    """Return the shape of a repository, in any case of letters; None when it is not in the table."""
    entry = _repositories().get(repository.lower())
    return _shape(entry["config"], entry.get("quantization")) if entry is not None else None


@functools.cache
def _shape(config: str, quantization: str | None) -> ModelShape:
    values = dict(_table()["configs"][config])
    if quantization is not None:
        values["quantization_config"] = _table()["quantizations"][quantization]
    return read_shape(values, f"known model {config}")


@functools.cache
def _table() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("known_models.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.safe_load(text)
    return table


@functools.cache
def _repositories() -> dict[str, dict[str, str]]:
    return {name.lower(): entry for name, entry in _table()["repositories"].items()}
