"""A tiny base model, and ways to change it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines import one_thread
from tests.support.short_answers import short_answers
from tests.support.tiny_model import write_tiny_model

Change = Callable[[str, torch.Tensor], torch.Tensor]

__all__ = ["one_thread", "short_answers"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """Small products on many threads wait for each other where other processes use the cores."""


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("quality") / "base", scale=0.15)


@pytest.fixture
def changed(base: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """Make a candidate: the base with each weight replaced by `change(name, weight)`."""

    def make(change: Change) -> Path:
        folder = tmp_path / "candidate"
        shutil.copytree(base, folder)
        weights = load_file(folder / "model.safetensors")
        save_file(
            {name: change(name, weight).contiguous() for name, weight in weights.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        return folder

    return make


def noise(strength: float) -> Change:
    """Gaussian noise of that share of each matrix's own deviation."""
    generator = torch.Generator().manual_seed(1)

    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        if weight.dim() < 2:
            return weight
        return weight + strength * weight.std() * torch.randn(weight.shape, generator=generator)

    return change


def write_data(path: Path, lines: Iterable[Any]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return path


def texts(count: int, slice_name: str | None = None, length: int = 60, seed: int = 0) -> list[dict[str, str]]:
    """Random letters: one token per letter."""
    choose = random.Random(seed)
    rows = [{"text": "".join(choose.choices("abcdefgh ", k=length))} for _ in range(count)]
    return rows if slice_name is None else [row | {"slice": slice_name} for row in rows]
