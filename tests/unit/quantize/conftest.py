"""A tiny model and data, quantized by the command as a person types it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from millstream.cli import main
from tests.support.engines import one_thread
from tests.support.short_answers import short_answers
from tests.support.tiny_model import write_tiny_model

__all__ = ["one_thread", "short_answers"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """Small products on many threads wait for each other where other processes use the cores."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, hidden size 64."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", scale=0.15, num_hidden_layers=4)


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are whole blocks of Q4_K."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    return write_tiny_model(folder, scale=0.05, hidden_size=256, intermediate_size=512, num_hidden_layers=4)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 texts of 150 letters; a letter is a token."""
    choose = random.Random(3)
    path = tmp_path_factory.mktemp("data") / "calibration.jsonl"
    rows = [{"text": "".join(choose.choices("abcdefgh ", k=150))} for _ in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def quantize(model: Path, out: Path, *flags: str) -> int:
    """The exit code."""
    return main(["quantize", str(model), f"--out={out}", "--device=cpu", *flags])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*"))}
