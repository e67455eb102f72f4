"""Engines with each kind of drafts, requests that have some, and what the engines counted.

All that is proposed is checked, whatever it costs. A test of the governor names its mode.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream_runtime.config import GovernorMode, SpeculationMethod
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.request import Request, SamplingParams, SpeculationStats
from millstream_runtime.engine.speculation import catching_up
from tests.support.eagle_heads import WriteHead
from tests.support.engines import MakeEngine
from tests.support.medusa_heads import write_medusa_heads
from tests.support.tree_drafters import TREE_TEXT

MakeDrafting = Callable[..., Engine]
Config = dict[str, Any]


def _by(method: SpeculationMethod) -> Config:
    return {"speculation_method": method, "speculation_governor": GovernorMode.DISABLED}


N_GRAMS, DRAFT_MODEL = _by(SpeculationMethod.N_GRAM), _by(SpeculationMethod.DRAFT_MODEL)
EAGLE, MEDUSA = _by(SpeculationMethod.EAGLE), _by(SpeculationMethod.MEDUSA)
EAGLE_TREE, MEDUSA_TREE = EAGLE | {"draft_tree": TREE_TEXT}, MEDUSA | {"draft_tree": TREE_TEXT}


@pytest.fixture
def drafts_catch_up_by_fixed_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a draft model or a head catches up with depends on no measured time, however busy the machine is."""
    monkeypatch.setattr(catching_up, "FIRST_TOKENS", 512)
    monkeypatch.setattr(catching_up, "CHUNK_SECONDS", 1e9)


@pytest.fixture
def drafted(make_engine: MakeEngine) -> MakeDrafting:
    """`drafted(folder, draft_folder, **config)`: an engine with a draft model; by default the model itself."""

    def make(folder: Path, draft: Path | None = None, **config: Any) -> Engine:
        return make_engine(folder, **(DRAFT_MODEL | {"draft_model": str(draft or folder)} | config))

    return make


@pytest.fixture
def eagle_headed(make_engine: MakeEngine, write_head: WriteHead) -> MakeDrafting:
    """`eagle_headed(folder, head, **config)`: an engine with an EAGLE head; by default a random one of the folder."""

    def make(folder: Path, head: Path | None = None, **config: Any) -> Engine:
        return make_engine(folder, **(EAGLE | {"draft_model": str(head or write_head(folder))} | config))

    return make


@pytest.fixture
def eagle_treed(make_engine: MakeEngine) -> MakeDrafting:
    """`eagle_treed(folder, head, **config)`: an engine whose EAGLE head proposes a tree."""

    def make(folder: Path, head: Path, **config: Any) -> Engine:
        return make_engine(folder, **(EAGLE_TREE | {"draft_model": str(head)} | config))

    return make


@pytest.fixture
def medusa_headed(make_engine: MakeEngine) -> MakeDrafting:
    """`medusa_headed(folder, heads, **config)`: an engine with Medusa heads."""

    def make(folder: Path, heads: Path, **config: Any) -> Engine:
        return make_engine(folder, **(MEDUSA | {"draft_model": str(heads)} | config))

    return make


@pytest.fixture
def medusa_treed(make_engine: MakeEngine, tmp_path: Path) -> MakeDrafting:
    """`medusa_treed(folder, **config)`: an engine whose Medusa heads, random ones in `tmp_path / "heads"`, propose a
    tree."""

    def make(folder: Path, **config: Any) -> Engine:
        heads = medusa_heads_of(folder, tmp_path / "heads")
        return make_engine(folder, **(MEDUSA_TREE | {"draft_model": str(heads)} | config))

    return make


def medusa_heads_of(target: Path, folder: Path) -> Path:
    """Write random heads of the target's sizes to `folder`."""
    shape = json.loads((target / "config.json").read_text())
    return write_medusa_heads(folder, shape["hidden_size"], shape["vocab_size"])


def requests_of(lengths: tuple[int, ...], sampling: SamplingParams) -> list[Request]:
    """`r0`, `r1`, .. with prompts of these lengths, each with tokens of its own."""
    return [
        Request(f"r{index}", [(7 * place + 13 * length + place * place) % 199 for place in range(length)], sampling)
        for index, length in enumerate(lengths)
    ]


def counts(engine: Engine) -> SpeculationStats:
    """What the engine counted of its drafts."""
    found = engine.stats().speculation
    assert found is not None
    return found


def skipped(engine: Engine) -> dict[str, int]:
    """How many decodes had no drafts, by reason."""
    return {reason: count for reason, count in counts(engine).skipped.items() if count}
