"""Muon for the matrices of the layers, AdamW for the embedding and the norms: one step, and a state that can be saved.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by the nearest orthogonal matrix, by five Newton-Schulz
iterations. A step costs a sixth more than AdamW's, and fewer tokens are needed for the same loss. `torch.optim.Muon`
iterates in bfloat16, which processors without such instructions compute very slowly; this one stays in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor

import torch
from torch import nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MOMENTUM = 0.95
BETAS, EPSILON = (0.9, 0.95), 1e-8
EMBEDDINGS = ("embed_tokens.", "lm_head.")  # matrices whose rows are tokens: AdamW's, like vectors


class MuonAdamW:
    """Steps over the parameters of a model; `rate` scales both learning rates."""

    def __init__(self, model: nn.Module, muon_rate: float, adam_rate: float, weight_decay: float) -> None:
        parameters = dict(model.named_parameters())
        matrices = [name for name, p in parameters.items() if p.dim() == 2 and not any(e in name for e in EMBEDDINGS)]
        self._matrices = {name: parameters.pop(name) for name in matrices}
        self._others = parameters
        self._muon_rate, self._adam_rate, self._weight_decay = muon_rate, adam_rate, weight_decay
        self._momentum = {name: torch.zeros_like(p) for name, p in self._matrices.items()}
        self._mean = {name: torch.zeros_like(p) for name, p in self._others.items()}
        self._square = {name: torch.zeros_like(p) for name, p in self._others.items()}

    @torch.no_grad()
    def step(self, number: int, rate: float, pool: Executor) -> None:
        """Step `number`, from 1, the matrices in parallel. Every parameter has a gradient, which stays as it is."""
        rates = [self._muon_rate * rate] * len(self._matrices)
        list(pool.map(self._step_matrix, self._matrices.values(), self._momentum.values(), rates))
        for name, parameter in self._others.items():
            gradient = parameter.grad
            assert gradient is not None
            self._mean[name].lerp_(gradient, 1 - BETAS[0])
            self._square[name].lerp_(gradient.square(), 1 - BETAS[1])
            mean = self._mean[name] / (1 - BETAS[0] ** number)
            square = self._square[name] / (1 - BETAS[1] ** number)
            parameter.sub_(self._adam_rate * rate * mean / (square.sqrt() + EPSILON))

    @torch.no_grad()
    def _step_matrix(self, matrix: nn.Parameter, momentum: torch.Tensor, rate: float) -> None:
        gradient = matrix.grad
        assert gradient is not None
        momentum.lerp_(gradient, 1 - MOMENTUM)
        update = orthogonalized(gradient.lerp(momentum, MOMENTUM))
        rows, columns = matrix.shape
        matrix.mul_(1 - rate * self._weight_decay)
        matrix.sub_(rate * max(1.0, rows / columns) ** 0.5 * update)

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors themselves, by names that `load` knows."""
        parts = {"momentum": self._momentum, "mean": self._mean, "square": self._square}
        return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(tensors[name])


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with its singular values moved to between about 0.7 and 1.2; float32 of the same shape.

    An iteration multiplies x by a polynomial of its Gram matrix, so all of them together are one factor, found with
    square matrices of the shorter side alone: that is half of the operations for a matrix four times as long as high.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix) / (matrix.norm() + 1e-7)
    gram = x @ x.T
    identity = torch.eye(len(x))
    factor = identity
    for iteration in range(NEWTON_SCHULZ_STEPS):
        polynomial = a * identity + b * gram + c * (gram @ gram)
        factor = polynomial if iteration == 0 else polynomial @ factor
        if iteration + 1 < NEWTON_SCHULZ_STEPS:
            gram = polynomial @ gram @ polynomial
    orthogonal: torch.Tensor = factor @ x
    return orthogonal.T if is_tall else orthogonal
