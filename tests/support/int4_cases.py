"""Weights of 4 bits as plain numbers, and packed in the published formats and read by the runtime's own loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from millstream_kernels.linear.int4_weight import Int4Weight, repack
from millstream_runtime.models.loading.tensor_store import DescribedTensor, TensorStore
from millstream_runtime.models.loading.weights import LoadedWeights
from millstream_runtime.quantization.gpu.int4_linear import int4_weight
from millstream_runtime.quantization.grouped_weight import GroupedWeight
from millstream_runtime.quantization.quantized_linear import DequantizingLinear
from millstream_runtime.quantization.weight_layout import WeightLayout


@dataclass(frozen=True)
class Int4Case:
    """A random weight `[K, N]` in groups. `symmetric`: one zero point for all."""

    num_inputs: int
    num_outputs: int
    group_size: int | None
    scale_dtype: torch.dtype = torch.float16
    symmetric: bool = False
    seed: int = 0
    codes: Tensor = field(init=False, repr=False)
    scales: Tensor = field(init=False, repr=False)
    zeros: Tensor | int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        shape = (-(-self.num_inputs // (self.group_size or self.num_inputs)), self.num_outputs)
        codes = torch.randint(0, 16, (self.num_inputs, self.num_outputs), dtype=torch.uint8, generator=random)
        scales = (torch.rand(shape, generator=random) * 0.02 + 0.001).to(self.scale_dtype)
        zeros = torch.randint(0, 16, shape, dtype=torch.uint8, generator=random)
        for name, value in (("codes", codes), ("scales", scales), ("zeros", 8 if self.symmetric else zeros)):
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        kind = f"{str(self.scale_dtype).removeprefix('torch.')}{'-symmetric' if self.symmetric else ''}"
        return f"{self.num_inputs}x{self.num_outputs}-group{self.group_size}-{kind}"

    @property
    def dense(self) -> Tensor:
        """`[K, N]`, float64."""
        groups = torch.arange(self.num_inputs) // (self.group_size or self.num_inputs)
        zeros = self.zeros.double()[groups] if isinstance(self.zeros, Tensor) else self.zeros
        return (self.codes.double() - zeros) * self.scales.double()[groups]

    def packed(self) -> Int4Weight:
        return repack(self.codes, self.scales, self.zeros, self.group_size)


def unpacked(weight: Int4Weight) -> Tensor:
    """`[K, N]`, float64, inputs in the layer's order: by plain loops over the words."""
    output_tiles, input_tiles = weight.codes.shape[:2]
    dense = torch.empty(input_tiles * 128, output_tiles * 128, dtype=torch.float64)
    words = weight.codes.long() & 0xFFFFFFFF
    for run in range(4):
        for word in range(16):
            for neighbour in range(2):
                places = torch.arange(input_tiles) * 128 + 32 * run + 2 * word + neighbour
                nibbles = words[..., word] >> (4 * run + 16 * (1 - neighbour)) & 15
                dense[places] = nibbles.permute(1, 0, 2).reshape(input_tiles, -1).double()
    dense = dense[: weight.num_inputs, : weight.num_outputs]
    groups = torch.arange(weight.num_inputs) // weight.group_size
    by_group = weight.groups.transpose(0, 1).reshape(weight.groups.shape[1], -1)[:, : weight.num_outputs]
    scales = by_group.to(torch.int16).view(weight.scale_dtype).double()
    dense = (dense - (by_group >> 16)[groups]) * scales[groups]
    if weight.order is None:
        return dense
    return torch.empty_like(dense).index_copy_(0, weight.order, dense)


class Tensors(TensorStore):
    """A checkpoint of a few tensors, which nothing checked."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(Path())
        self._tensors = tensors

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def path_of(self, name: str) -> Path:
        return Path()

    def described(self, name: str) -> DescribedTensor | None:
        found = self._tensors.get(name)
        return None if found is None else DescribedTensor(Path(), tuple(found.shape), "")

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def read_cut(self, name: str, ranges: Sequence[tuple[range, ...]]) -> Tensor:
        raise NotImplementedError

    def close(self) -> None: ...


def loaded(layout: WeightLayout, tensors: Mapping[str, Tensor], num_outputs: int, num_inputs: int) -> GroupedWeight:
    """What the runtime's loader makes of the tensors of one module; their names without it."""
    source = LoadedWeights(
        Tensors({f"module.{name}": one for name, one in tensors.items()}), torch.bfloat16, torch.device("cpu")
    )
    linear = layout.linear(source, {"module": num_outputs}, num_inputs, None)
    assert isinstance(linear, DequantizingLinear)
    assert isinstance(linear.weight, GroupedWeight)
    return linear.weight


def repacked(weight: GroupedWeight) -> Int4Weight:
    """As the engine repacks it."""
    found = int4_weight(weight)
    assert found is not None
    return found
