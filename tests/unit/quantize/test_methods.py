"""What AWQ and GPTQ gain over rounding to nearest: one layer's error, and the demo model with outlier channels."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hack.training import knowledge
from hack.training.phrasings import held_out_questions, questions
from millstream_runtime.config import Device, RuntimeConfig
from millstream_runtime.quality.documents import TokenizedDocument, read_documents, tokenize
from millstream_runtime.quality.scored_model import ScoredModel
from millstream_runtime.quality.token_scores import score
from millstream_runtime.quantize.layers.input_statistics import InputStatistics
from millstream_runtime.quantize.methods.awq_search import ScaledModules, search_scales, search_shrinks
from millstream_runtime.quantize.methods.gptq_solve import RoundingOrder, solve
from millstream_runtime.quantize.methods.rounding import round_to_groups
from millstream_runtime.quantize.settings import ActOrder
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.support.outlier_transplant import transplant_outliers
from tests.unit.quality.conftest import write_data
from tests.unit.quantize.conftest import quantize

DEMO = Path(__file__).resolve().parents[3] / "models/demo-chat"
GROUP = 32


@pytest.fixture(scope="module")
def layer() -> tuple[Tensor, Tensor, InputStatistics]:
    """A weight `[96, 128]`, rows `[2000, 128]` of correlated inputs, and their statistics."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 128, generator=generator)
    spread = torch.exp2(3 * torch.randn(128, generator=generator))
    mixing = torch.randn(24, 128, generator=generator)
    rows = (torch.randn(2000, 24, generator=generator) @ mixing + torch.randn(2000, 128, generator=generator)) * spread
    statistics = InputStatistics.empty(128, torch.device("cpu"), with_moments=True)
    for start in range(0, len(rows), 300):
        statistics.add(rows[start : start + 300])
    return weight, rows, statistics


def error(changed: Tensor, weight: Tensor, rows: Tensor) -> float:
    """Mean squared, of the outputs."""
    return float((rows @ (changed - weight).t()).square().mean())


def test_moments_give_the_error_of_the_rows(layer: tuple[Tensor, Tensor, InputStatistics]) -> None:
    weight, rows, statistics = layer
    change = round_to_groups(weight, 4, GROUP).dequantized() - weight
    by_moments = float(((change @ statistics.second_moments) * change).sum()) / len(weight) / len(rows)
    assert by_moments == pytest.approx(error(weight + change, weight, rows), rel=1e-3)


@pytest.mark.parametrize("act_order", ActOrder)
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_loses_less_than_rounding(
    act_order: ActOrder, symmetric: bool, layer: tuple[Tensor, Tensor, InputStatistics]
) -> None:
    weight, rows, statistics = layer
    nearest = round_to_groups(weight, 4, GROUP, symmetric=symmetric).dequantized()
    shared = RoundingOrder.of(copy.deepcopy(statistics), GROUP, act_order, 0.01)
    solved = solve(weight, shared, 4, GROUP, symmetric=symmetric)
    assert error(solved.dequantized(), weight, rows) <= 0.8 * error(nearest, weight, rows)


@pytest.mark.parametrize("act_order", ActOrder)
def test_gptq_takes_inputs_that_are_never_seen_or_always_the_same(act_order: ActOrder) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    statistics = InputStatistics.empty(64, torch.device("cpu"), with_moments=True)
    shared = RoundingOrder.of(copy.deepcopy(statistics), GROUP, act_order, 0.01)
    unseen = solve(weight, shared, 4, GROUP, symmetric=True)
    statistics.add(torch.cat([torch.ones(3, 40), torch.zeros(3, 24)], dim=1))
    once = solve(weight, RoundingOrder.of(statistics, GROUP, act_order, 0.01), 4, GROUP, symmetric=True)
    for found in (unseen, once):
        assert (found.dequantized() - weight).abs().max() < weight.abs().max()


def test_awq_scales_what_large_activations_read(layer: tuple[Tensor, Tensor, InputStatistics]) -> None:
    weight, rows, statistics = layer
    scales = search_scales([ScaledModules(weight, statistics)], 4, GROUP, powers_of_two=False)
    nearest = round_to_groups(weight, 4, GROUP).dequantized()
    scaled = round_to_groups(weight * scales, 4, GROUP).dequantized() / scales
    assert error(scaled, weight, rows) <= 0.5 * error(nearest, weight, rows)


def test_awq_clips_ranges_where_that_loses_less(layer: tuple[Tensor, Tensor, InputStatistics]) -> None:
    weight, rows, statistics = layer
    nearest = round_to_groups(weight, 4, GROUP).dequantized()
    shrinks = search_shrinks(weight, statistics.group_moments(GROUP), 4)
    clipped = round_to_groups(weight, 4, GROUP, shrinks).dequantized()
    assert 0 < int((shrinks < 1).sum()) < shrinks.numel()
    assert error(clipped, weight, rows) < error(nearest, weight, rows)


@pytest.fixture(scope="module")
def transplanted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with the outlier channels of large models."""
    folder = tmp_path_factory.mktemp("transplanted") / "model"
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    weights = transplant_outliers(load_file(DEMO / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def trained(fact: knowledge.Fact, facet: str) -> str:
    """A question that is not held out."""
    return next(one for one in questions(fact, facet) if one not in held_out_questions(fact, facet))


def chat(question: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.mark.deep
def test_with_outlier_channels_awq_and_gptq_keep_what_rounding_loses(transplanted: Path, tmp_path: Path) -> None:
    facts = knowledge.load()
    data = write_data(
        tmp_path / "data.jsonl",
        [chat(trained(one, facet), one.answers[facet]) for one in facts for facet in one.answers],
    )
    judged = write_data(
        tmp_path / "judged.jsonl",
        [
            chat(next(iter(held_out_questions(one, facet))), one.answers[facet])
            for one in facts[:10]
            for facet in list(one.answers)[:1]
        ],
    )
    documents = tokenize(read_documents(judged), Tokenizer.from_folder(DEMO), frozenset(), 512)
    base = load(transplanted)

    def mean_kl(method: str) -> float:
        flags = (f"--method={method}", f"--calibration={data}", "--max-sequences=16", "--sequence-tokens=256")
        assert quantize(transplanted, tmp_path / method, "--no-quality", "--group-size=64", *flags) == 0
        return distance(base, load(tmp_path / method), documents)

    nearest = mean_kl("rtn")
    assert mean_kl("awq") <= 0.35 * nearest
    assert mean_kl("gptq") <= 0.8 * nearest


def load(folder: Path) -> ScoredModel:
    return ScoredModel(RuntimeConfig(model=str(folder), served_model_name="m", device=Device.CPU, max_model_len=512))


def distance(base: ScoredModel, candidate: ScoredModel, documents: list[TokenizedDocument]) -> float:
    return float(np.concatenate([score(base, candidate, one).kl for one in documents]).mean())
