"""The weights of one part of a model: those that are wanted are loaded, all others are meta tensors.

A family's `build` makes the whole model. With these it gets what it asks for, of which only the part takes memory and
is read. The part computes what it computes in a model that is loaded whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from millstream_runtime.models.linear.linear import ExpertLinears, Linear
from millstream_runtime.models.linear.several import LinearPerExpert
from millstream_runtime.models.linear.shares import Size, kept_size
from millstream_runtime.models.loading.placement import Placement
from millstream_runtime.models.loading.tensor_store import TensorStore
from millstream_runtime.models.loading.weights import LayoutOf, LoadedWeights
from millstream_runtime.quantization.quantized_linear import PlannedLinear
from millstream_runtime.quantization.weight_layout import FLOATS

IsWanted = Callable[[str], bool]  # of the name of a tensor, or of a linear module


class PartWeights(LoadedWeights):
    """`is_wanted` says which tensors and linear modules belong to the part."""

    def __init__(
        self,
        checkpoint: TensorStore,
        dtype: torch.dtype,
        device: torch.device,
        is_wanted: IsWanted,
        *,
        copy_budget_bytes: int,
        layout_of: LayoutOf | None,
        placement: Placement,
        may_round_activations: bool = True,
    ) -> None:
        super().__init__(
            checkpoint,
            dtype,
            device,
            copy_budget_bytes=copy_budget_bytes,
            layout_of=layout_of,
            placement=placement,
            may_round_activations=may_round_activations,
        )
        self._is_wanted = is_wanted

    def read(self, name: str, shape: tuple[Size, ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor:
        return super().read(name, shape, dtypes) if self._is_wanted(name) else self._absent(shape)

    def read_optional(self, name: str, shape: tuple[Size, ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor | None:
        return super().read_optional(name, shape, dtypes) if self._is_wanted(name) else None

    def read_scale(self, name: str, shape: tuple[Size, ...]) -> Tensor:
        return super().read_scale(name, shape) if self._is_wanted(name) else self._absent(shape)

    def read_document(self, name: str) -> dict[str, Any] | None:
        return super().read_document(name) if self._is_wanted(name) else None

    def tensor(self, name: str, *shape: Size, dtype: torch.dtype | None = None) -> Tensor:
        return super().tensor(name, *shape, dtype=dtype) if self._is_wanted(name) else self._absent(shape, dtype)

    def dense_weight(self, module: str, out_features: Size, in_features: Size) -> Tensor:
        if not self._is_wanted(module):
            return self._absent((out_features, in_features))
        return super().dense_weight(module, out_features, in_features)

    def linear(self, parts: Mapping[str, Size], in_features: Size, bias: bool = False) -> Linear:
        if not self._is_wanted(next(iter(parts))):
            return PlannedLinear(None)
        return super().linear(parts, in_features, bias)

    def linear_of(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return PlannedLinear(None) if weight.is_meta else super().linear_of(weight, bias)

    def is_output_major(self, num_elements: int) -> bool:
        """True, so that a tied head, which may be absent here, is not copied."""
        return True

    def expert_linears(self, experts: Sequence[Mapping[str, Size]], in_features: Size) -> ExpertLinears:
        if not self._is_wanted(next(iter(experts[0]))):
            return LinearPerExpert([PlannedLinear(None)] * len(experts))
        return super().expert_linears(experts, in_features)

    def _absent(self, shape: Sequence[Size], dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(tuple(map(kept_size, shape)), dtype=dtype or self.dtype, device="meta")
