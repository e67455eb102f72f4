"""Which tensors each layer of a model has, and which of its linear modules read the same input. Reads no weight.

It follows from the model's own code: its `build` runs over meta tensors, and every call of `Weights.linear` is noted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.linear.linear import ExpertLinears, Linear
from millstream_runtime.models.linear.several import LinearPerExpert
from millstream_runtime.models.linear.shares import Size, total_size
from millstream_runtime.models.loading.weights import ExpectedWeights
from millstream_runtime.models.registry import family_code

LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linear modules that read one input. `outputs`: of each module, by its name in the checkpoint."""

    outputs: Mapping[str, int]
    num_inputs: int

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.outputs)


@dataclass(frozen=True, slots=True)
class LayerOutline:
    """One decoder layer. `tensors`: every tensor that the checkpoint must hold for it, with its shape."""

    prefix: str  # model.layers.0.
    tensors: Mapping[str, tuple[int, ...]]
    groups: tuple[LinearGroup, ...]


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """`outer`: the tensors outside of the layers, which stay as they are."""

    layers: tuple[LayerOutline, ...]
    outer: tuple[str, ...]
    expected: ExpectedWeights


class _NotedWeights(ExpectedWeights):
    """`ExpectedWeights` that notes linear modules."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.groups: list[LinearGroup] = []

    def linear(self, parts: Mapping[str, Size], in_features: Size, bias: bool = False) -> Linear:
        outputs = {name: total_size(size) for name, size in parts.items()}
        self.groups.append(LinearGroup(outputs, total_size(in_features)))
        return super().linear(parts, in_features, bias)

    def expert_linears(self, experts: Sequence[Mapping[str, Size]], in_features: Size) -> ExpertLinears:
        return LinearPerExpert([self.linear(parts, in_features) for parts in experts])


def outline_of(config: ModelConfig) -> ModelOutline:
    """Return the outline of a model that is not quantized."""
    weights = _NotedWeights()
    family_code(config.architecture).build(config, weights)
    layers = []
    for number in range(config.num_layers):
        prefix = f"model.layers.{number}."
        tensors = {name: shape for name, shape in weights.expected.items() if name.startswith(prefix)}
        groups = tuple(one for one in weights.groups if one.modules[0].startswith(prefix))
        layers.append(LayerOutline(prefix, tensors, groups))
    outer = tuple(name for name in weights.expected if not LAYER.match(name))
    return ModelOutline(tuple(layers), outer, weights)
