"""The pair in models/ on text of files that training never saw: there quantization and speculation can be judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hack.training import held_out
from hack.training.corpus.documents import CHAT, CODE, SLICES
from hack.training.corpus.sources import is_held_out
from hack.training.evaluate import load
from hack.training.recipe import DRAFT, TARGET
from hack.training.slice_evaluation import evaluate_slices
from millstream_runtime.quality.documents import read_documents, tokenize
from millstream_runtime.tokenizing.tokenizer import Tokenizer

pytestmark = pytest.mark.deep

MODELS = Path(__file__).parents[3] / "models"
NAMES = (TARGET.name, DRAFT.name)


def recorded_evaluation() -> dict[str, Any]:
    evaluation: dict[str, Any] = json.loads((MODELS / TARGET.name / "evaluation.json").read_text())
    return evaluation


@pytest.mark.parametrize("name", SLICES)
def test_the_pair_neither_recites_nor_guesses_text_of_held_out_files(name: str) -> None:
    measured = recorded_evaluation()["slices"]
    assert 5 <= measured[name]["target_perplexity"] <= 60
    if name == CODE:  # which the draft never read
        assert all(measured[CODE]["agreement_percent"] < measured[other]["agreement_percent"] for other in SLICES[::2])
    else:
        assert 40 <= measured[name]["agreement_percent"] <= 75
    for card in NAMES:
        assert f"| {measured[name]['agreement_percent']:.1f} % |" in (MODELS / card / "README.md").read_text()


def test_the_recorded_figures_of_a_slice_are_those_of_these_weights() -> None:
    target, tokenizer = load(MODELS / TARGET.name)
    draft, _ = load(MODELS / DRAFT.name)
    lines = [line for line in held_out.read(MODELS / held_out.NAME) if line["slice"] == CHAT]
    measured = evaluate_slices(target, draft, tokenizer, lines)[CHAT].as_json()
    assert measured == pytest.approx(recorded_evaluation()["slices"][CHAT], rel=0.01)


def test_every_held_out_slice_is_large_enough_for_millstream_quality() -> None:
    documents = read_documents(MODELS / held_out.NAME)
    tokenized = tokenize(documents, Tokenizer.from_folder(MODELS / TARGET.name), frozenset({0, 2}), 2048)
    for name in SLICES:
        of_slice = [document for document in tokenized if document.slice == name]
        assert len(of_slice) >= 20
        assert sum(document.num_judged_tokens for document in of_slice) >= 1000


def test_the_text_of_the_figures_is_of_files_that_training_leaves_out() -> None:
    lines = held_out.read(MODELS / held_out.NAME)
    assert all(is_held_out(*line["source"].split(": ")) for line in lines)
    assert all(line["license"] for line in lines)
