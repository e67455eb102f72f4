"""The table of known models as tests read it: all repositories, and the config.json that a shape is read from."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import yaml


def known_config(repository: str) -> dict[str, Any] | None:
    """Return the fields of its config.json that the shape is read from; None for a repository not in the table."""
    names = {name.lower(): entry["config"] for name, entry in _table()["repositories"].items()}
    config = names.get(repository.lower())
    return None if config is None else dict(_table()["configs"][config])


def known_configs() -> dict[str, dict[str, Any]]:
    """Return the fields of each config.json of the table, by the name of the model."""
    return {name: dict(fields) for name, fields in _table()["configs"].items()}


def known_repositories() -> list[str]:
    return list(_table()["repositories"])


@functools.cache
def _table() -> dict[str, Any]:
    text = resources.files("millstream_operator.catalog").joinpath("known_models.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.safe_load(text)
    return table
