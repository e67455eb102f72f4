"""The transplant keeps the function of the demo model, and makes plain 4-bit rounding several times worse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hack.training import knowledge
from hack.training.phrasings import held_out_questions
from millstream_runtime.config import Device, DType, RuntimeConfig
from millstream_runtime.quality.documents import TokenizedDocument, read_documents, tokenize
from millstream_runtime.quality.scored_model import ScoredModel
from millstream_runtime.quality.token_scores import score
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.support.outlier_transplant import transplant_outliers
from tests.unit.quality.conftest import write_data

pytestmark = pytest.mark.deep

DEMO = Path(__file__).resolve().parents[3] / "models/demo-chat"
GROUP = 64
Weights = dict[str, torch.Tensor]


def rounded_to_4_bits(weights: Weights) -> Weights:
    """Each group of a row to 16 equal steps between its least and its greatest weight."""

    def one(weight: torch.Tensor) -> torch.Tensor:
        groups = weight.float().reshape(len(weight), -1, GROUP)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        step = (high - low) / 15
        return (((groups - low) / step).round() * step + low).reshape(weight.shape)

    return {name: one(weight) if "proj" in name else weight.float() for name, weight in weights.items()}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[TokenizedDocument]:
    facts = knowledge.load()[:10]
    lines = [
        {
            "messages": [
                {"role": "user", "content": next(iter(held_out_questions(fact, facet)))},
                {"role": "assistant", "content": fact.answers[facet]},
            ]
        }
        for fact in facts
        for facet in list(fact.answers)[:1]
    ]
    data = write_data(tmp_path_factory.mktemp("data") / "held_out.jsonl", lines)
    return tokenize(read_documents(data), Tokenizer.from_folder(DEMO), frozenset(), 512)


def load(folder: Path) -> ScoredModel:
    """In exact numbers, on any CPU."""
    config = RuntimeConfig(
        model=str(folder), served_model_name="m", device=Device.CPU, dtype=DType.FLOAT32, max_model_len=512
    )
    return ScoredModel(config)


def mean_kl(base: ScoredModel, candidate: Weights, documents: list[TokenizedDocument], folder: Path) -> float:
    """Of the demo model with these weights; `folder` is made."""
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    weights = {key: value.contiguous() for key, value in candidate.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(folder)
    return float(np.concatenate([score(base, model, one).kl for one in documents]).mean())


def test_the_function_stays_and_plain_rounding_gets_worse(documents: list[TokenizedDocument], tmp_path: Path) -> None:
    base, weights = load(DEMO), load_file(DEMO / "model.safetensors")
    transplanted = transplant_outliers(weights)
    assert mean_kl(base, transplanted, documents, tmp_path / "same") < 1e-9
    plain = mean_kl(base, rounded_to_4_bits(weights), documents, tmp_path / "plain")
    assert mean_kl(base, rounded_to_4_bits(transplanted), documents, tmp_path / "outliers") > 5 * plain


def test_on_text_that_is_not_recited_rounding_gets_worse_within_bounds(tmp_path: Path) -> None:
    """12 to 14 times in each slice, as docs/quantization.md says; more would be no model of large models any more."""
    lines = [json.loads(line) for line in (DEMO.parent / "held_out.jsonl").read_text().splitlines()]
    data = [line for name in ("prose", "code", "chat") for line in [one for one in lines if one["slice"] == name][:2]]
    held_out = read_documents(write_data(tmp_path / "held_out.jsonl", data))
    documents = tokenize(held_out, Tokenizer.from_folder(DEMO), frozenset(), 512)
    base, weights = load(DEMO), load_file(DEMO / "model.safetensors")
    plain = mean_kl(base, rounded_to_4_bits(weights), documents, tmp_path / "plain")
    worse = mean_kl(base, rounded_to_4_bits(transplant_outliers(weights)), documents, tmp_path / "outliers")
    assert 5 * plain < worse < 20 * plain
