"""Muon makes the update of a matrix orthogonal, and its state can be saved."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaForCausalLM

from hack.training.optimizer import MuonAdamW, orthogonalized
from hack.training.recipe import DRAFT


@pytest.mark.parametrize("shape", [(32, 32), (24, 96), (96, 24)])
def test_singular_values_become_about_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalized(matrix))
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_directions_stay() -> None:
    matrix = torch.randn(8, 20, generator=torch.Generator().manual_seed(2))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.linalg.matrix_norm(left.T @ orthogonalized(matrix) @ right.T, 2) < 1.3
    assert (torch.diagonal(left.T @ orthogonalized(matrix) @ right.T) > 0.3).all()


def test_the_matrices_of_layers_are_muons_and_all_parameters_move() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(DRAFT.config())
    optimizer = MuonAdamW(model, muon_rate=0.02, adam_rate=1e-3, weight_decay=0.01)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(input_ids=torch.arange(12)[None]).logits.square().mean().backward()
    with ThreadPoolExecutor(2) as pool:
        optimizer.step(1, 1.0, pool)
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    momenta = {name for name in optimizer.state() if name.startswith("momentum.")}
    assert len(momenta) == 7 * DRAFT.num_hidden_layers
    assert not any("norm" in name or "embed" in name for name in momenta)
