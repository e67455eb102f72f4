"""What a model asks of a checkpoint: tensors by name and shape, in the engine's dtype, device and layout.

A family's `build` runs twice over the same code, so that names and shapes are written down once:

    ExpectedWeights   meta tensors; notes every name, shape and byte -> the memory estimate and `Checkpoint.check`
    LoadedWeights     the tensors themselves, after the whole checkpoint was checked

With several ranks each asks for its own share: shapes are always those of the checkpoint, a `Cut` says what of them is
kept, and only that is read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from millstream_runtime.models.linear.linear import Linear, PlainLayout, Projection, WeightLayout
from millstream_runtime.models.linear.shares import Cut
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS, Ranks, RowParallelLinear
from millstream_runtime.models.loading.checkpoint import Checkpoint, check_finite
from millstream_runtime.models.weight_layouts import weight_layout_for

Size = int | Cut  # of a tensor in the checkpoint along one dimension: all of it, or what this rank keeps


class Weights(ABC):
    """Attributes: `ranks`, among whom the model is shared; `dtype` and `device` of the tensors."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = SINGLE_PROCESS,
        layout: WeightLayout | None = None,
    ) -> None:
        """`layout`: of linear weights; `PlainLayout` by default."""
        self.dtype = dtype
        self.device = device
        self.ranks = ranks
        self._layout: WeightLayout = layout if layout is not None else PlainLayout()
        self._tensor_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensors handed out so far take on the device, copies of linear weights included."""
        return self._tensor_bytes + self._layout.copy_bytes

    @abstractmethod
    def _read(self, name: str, shape: tuple[Size, ...]) -> Tensor:
        """One tensor of the checkpoint on `device`, in the file's dtype. It may be the mapped file: copy it."""

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor for a weight, counted in `num_bytes`."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self._tensor_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def tensor(self, name: str, *shape: Size, dtype: torch.dtype | None = None) -> Tensor:
        """As it is in the checkpoint, but never the mapped file itself: that may be replaced under a running server."""
        return self.empty(*map(_kept, shape), dtype=dtype).copy_(self._read(name, shape))

    def wide_tensor(self, name: str, *shape: int) -> Tensor:
        """`tensor` in at least float32, for the little weights whose rounding would show."""
        return self.tensor(name, *shape, dtype=torch.promote_types(self.dtype, torch.float32))

    def linear(self, parts: Mapping[str, Size], in_features: Size, bias: bool = False) -> Linear:
        """Linears that share their input (name to outputs), side by side in one weight `[in, sum of outs]`."""
        out_features = sum(map(_kept, parts.values()))
        num_inputs = _kept(in_features)
        if self.is_output_major(num_inputs * out_features):
            weight = self.empty(out_features, num_inputs).t()
        else:
            weight = self.empty(num_inputs, out_features)
        self._fill(weight, parts, in_features)
        if not bias:
            return self.linear_of(weight)
        biases = [self._read(f"{name}.bias", (size,)).to(self.dtype) for name, size in parts.items()]
        return self.linear_of(weight, self.empty(out_features).copy_(self._joined(biases)))

    def linear_of(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The layer of a `weight` `[in, out]` that is counted in `num_bytes` already."""
        return self._layout.linear(weight, bias)

    def is_output_major(self, num_elements: int) -> bool:
        """Whether a linear weight of that size is to lie in memory as `[out, in]`; see `WeightLayout`."""
        return self._layout.is_output_major(num_elements)

    def output_linear(self, name: str, out_features: int, in_features: Cut, bias: bool = False) -> Projection:
        """The linear that ends a block, of those inputs that this rank computes: its output is everybody's sum."""
        linear = self.linear({name: out_features}, in_features, bias)
        return (
            linear if self.ranks.size == 1 else RowParallelLinear(replace(linear, bias=None), linear.bias, self.ranks)
        )

    def partial_linear(self, name: str, out_features: int, in_features: Cut, bias: bool = False) -> Linear:
        """The same without the sum, for a block that sums several at once. Rank 0 alone adds the bias."""
        linear = self.linear({name: out_features}, in_features, bias)
        return linear if self.ranks.rank == 0 else replace(linear, bias=None)

    def stacked_linear(self, experts: Sequence[Mapping[str, Size]], in_features: Size) -> Tensor:
        """The weights of `linear` for each expert: `[experts, in, sum of outs]`."""
        weights = self.empty(len(experts), _kept(in_features), sum(map(_kept, experts[0].values())))
        for weight, parts in zip(weights, experts, strict=True):
            self._fill(weight, parts, in_features)
        return weights

    def _fill(self, weight: Tensor, parts: Mapping[str, Size], in_features: Size) -> None:
        """Whole and in one dtype before it is transposed: torch has a fast path for exactly that."""
        rows = [self._read(f"{name}.weight", (size, in_features)).to(self.dtype) for name, size in parts.items()]
        weight.copy_((rows[0] if len(rows) == 1 else self._joined(rows)).t())

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Side by side along the first dimension."""
        return torch.cat(list(parts))


class ExpectedWeights(Weights):
    """No data, only demands.

    Attributes:
        expected: name and shape of every tensor that the checkpoint must hold.
        reads: name and number of elements of everything that will be read, in order.
    """

    def __init__(self, dtype: torch.dtype, ranks: Ranks = SINGLE_PROCESS) -> None:
        super().__init__(dtype, torch.device("meta"), ranks)
        self.expected: dict[str, tuple[int, ...]] = {}
        self.reads: list[tuple[str, int]] = []

    def _read(self, name: str, shape: tuple[Size, ...]) -> Tensor:
        self.expected[name] = tuple(size if isinstance(size, int) else size.total for size in shape)
        self.reads.append((name, math.prod(map(_kept, shape))))
        return torch.empty(tuple(map(_kept, shape)), dtype=self.dtype, device="meta")

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        # On meta tensors, torch.cat first imports torch's symbolic shapes: five seconds of every start.
        return torch.empty(sum(len(part) for part in parts), *parts[0].shape[1:], dtype=self.dtype, device="meta")


class LoadedWeights(Weights):
    """Tensors of a checkpoint that was checked before."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = SINGLE_PROCESS,
        on_read: Callable[[], None] = lambda: None,
        copy_budget_bytes: int = 0,
    ) -> None:
        """`on_read`: called after each tensor, whose pages are in memory then.

        `copy_budget_bytes`: what second copies of linear weights may take on a device that uses them.
        """
        super().__init__(dtype, device, ranks, weight_layout_for(device, dtype, copy_budget_bytes))
        self._checkpoint = checkpoint
        self._on_read = on_read

    def _read(self, name: str, shape: tuple[Size, ...]) -> Tensor:
        cut = [size for size in shape if isinstance(size, Cut) and not size.is_whole]
        source = (
            self._checkpoint.read_cut(name, [_ranges(size) for size in shape]) if cut else self._checkpoint.read(name)
        )
        check_finite(name, source)
        placed = source.to(self.device)
        self._on_read()
        return placed


def _kept(size: Size) -> int:
    return size if isinstance(size, int) else size.size


def _ranges(size: Size) -> tuple[range, ...]:
    return (range(size),) if isinstance(size, int) else size.kept
