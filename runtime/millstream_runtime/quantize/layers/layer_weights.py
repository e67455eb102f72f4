"""The weights of one layer in float32, in a model of which no other layer is loaded.

A family's `build` makes the whole model. Here it gets the tensors of one layer, and meta tensors in place of all
others. So the layer computes what it computes when the model is served, and memory holds one layer.

Linear modules are `ObservedLinear`: they show their input to an observer, and take their weight from `tensors` in each
product, so that it can be replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.linear.added_product import AddedProduct
from millstream_runtime.models.linear.linear import ExpertLinears, Linear
from millstream_runtime.models.linear.several import LinearPerExpert
from millstream_runtime.models.linear.shares import Size, kept_size
from millstream_runtime.models.loading.weights import Weights
from millstream_runtime.quantization.quantized_linear import PlannedLinear
from millstream_runtime.quantization.weight_layout import FLOATS

Observe = Callable[[tuple[str, ...], Tensor], None]  # modules that read one input, and that input [T, in]


def _ignore(modules: tuple[str, ...], x: Tensor) -> None:
    pass


class LayerWeights(Weights):
    """`tensors`: those of the layer by name, float32, in the checkpoint's shape. `observe` may be replaced."""

    def __init__(self, prefix: str, tensors: dict[str, Tensor], device: torch.device) -> None:
        super().__init__(Arithmetic.of(torch.float32), device)
        self._prefix = prefix
        self.tensors = tensors
        self.observe: Observe = _ignore

    def read(self, name: str, shape: tuple[Size, ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor:
        if name.startswith(self._prefix):
            return self.tensors[name]
        return torch.empty(tuple(map(kept_size, shape)), dtype=self.dtype, device="meta")

    def read_optional(self, name: str, shape: tuple[Size, ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor | None:
        return self.read(name, shape, dtypes)

    def read_scale(self, name: str, shape: tuple[Size, ...]) -> Tensor:
        return self.read(name, shape)

    def read_document(self, name: str) -> dict[str, Any] | None:
        """None: only quantized checkpoints have documents."""
        return None

    def tensor(self, name: str, *shape: Size, dtype: torch.dtype | None = None) -> Tensor:
        """A copy, so that a layer that changes it in place leaves `tensors` alone."""
        return self.read(name, shape).clone()

    def dense_weight(self, module: str, out_features: Size, in_features: Size) -> Tensor:
        return self.tensor(f"{module}.weight", out_features, in_features)

    def is_output_major(self, num_elements: int) -> bool:
        """True, so that nothing is copied."""
        return True

    def linear(self, parts: Mapping[str, Size], in_features: Size, bias: bool = False) -> Linear:
        modules = tuple(parts)
        if not modules[0].startswith(self._prefix):
            return PlannedLinear(None)
        return ObservedLinear(self, modules, bias)

    def expert_linears(self, experts: Sequence[Mapping[str, Size]], in_features: Size) -> ExpertLinears:
        return LinearPerExpert([self.linear(parts, in_features) for parts in experts])


@dataclass(frozen=True, slots=True)
class ObservedLinear(AddedProduct):
    """See `Linear`, and the top of the file."""

    source: LayerWeights
    modules: tuple[str, ...]
    has_bias: bool
    order: tuple[int, ...] | None = None

    @property
    def bias(self) -> Tensor | None:
        if not self.has_bias:
            return None
        return self._ordered(torch.cat([self.source.tensors[f"{module}.bias"] for module in self.modules]))

    def __call__(self, x: Tensor) -> Tensor:
        self.source.observe(self.modules, x)
        outputs = [F.linear(x, self.source.tensors[f"{module}.weight"]) for module in self.modules]
        found = self._ordered(outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1))
        bias = self.bias
        return found if bias is None else found.add_(bias)

    def without_bias(self) -> Linear:
        return replace(self, has_bias=False)

    def reordered(self, order: list[int]) -> Linear:
        return replace(self, order=tuple(order if self.order is None else [self.order[index] for index in order]))

    def _ordered(self, outputs: Tensor) -> Tensor:
        if self.order is None:
            return outputs
        return outputs.index_select(-1, torch.tensor(self.order, device=outputs.device))
