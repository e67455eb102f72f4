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

from millstream_runtime.models.cpu import two_layouts
from millstream_runtime.models.cpu.half_weights import MOST_PACKED_ELEMENTS, HalfWeight, half_copy, packed_bytes
from millstream_runtime.models.linear.linear import Linear, Projection
from millstream_runtime.models.linear.parallel import ALONE, Ranks, RowParallelLinear
from millstream_runtime.models.linear.shares import Cut
from millstream_runtime.models.loading.checkpoint import Checkpoint, check_finite

Size = int | Cut  # of a tensor in the checkpoint along one dimension: all of it, or what this rank keeps


class Weights(ABC):
    """Attributes: `ranks`, among whom the model is shared; `num_bytes`, what the tensors handed out so far take on the
    device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, ranks: Ranks = ALONE) -> None:
        self.dtype = dtype
        self.device = device
        self.ranks = ranks
        self.num_bytes = 0
        self._room_for_copies_bytes = 0
        self._num_packed_halves = 0  # elements

    @abstractmethod
    def _read(self, name: str, shape: tuple[Size, ...]) -> Tensor:
        """One tensor of the checkpoint on `device`, in the file's dtype. It may be the mapped file: copy it."""

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for a weight, counted in `num_bytes`."""
        room = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.num_bytes += room.numel() * room.element_size()
        return room

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
        if self.has_room_to_pack(num_inputs * out_features):
            weight = self.empty(out_features, num_inputs).t()
        else:
            weight = self.empty(num_inputs, out_features)
        self._fill(weight, parts, in_features)
        if not bias:
            return self.linear_of(weight)
        biases = [self._read(f"{name}.bias", (size,)).to(self.dtype) for name, size in parts.items()]
        return self.linear_of(weight, self.empty(out_features).copy_(self._joined(biases)))

    def linear_of(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Of a `weight` `[in, out]` that is counted already; with the copies that it gets and for which there is room.

        It is packed if it lies as `has_room_to_pack` wants it: `[out, in]` in memory.
        """
        packed = None
        if weight.t().is_contiguous() and self.has_room_to_pack(weight.numel()):
            packed = two_layouts.pack(weight)
            self._count_copy(weight.numel() * weight.element_size())
        return Linear(weight, bias, self._half_copy(weight), packed)

    def _half_copy(self, weight: Tensor) -> HalfWeight | None:
        num_elements, copy_bytes = weight.numel(), packed_bytes(weight.numel())
        if copy_bytes > self._room_for_copies_bytes or self._num_packed_halves + num_elements > MOST_PACKED_ELEMENTS:
            return None
        half = half_copy(weight)
        if half is not None:
            self._num_packed_halves += num_elements
            self._count_copy(copy_bytes)
        return half

    def has_room_to_pack(self, num_elements: int) -> bool:
        """Whether a linear weight of that size gets a packed copy: then it is to lie in memory as in the checkpoint."""
        copy_bytes = num_elements * self.dtype.itemsize
        return copy_bytes <= self._room_for_copies_bytes and two_layouts.can_pack(self.dtype, self.device)

    def _count_copy(self, copy_bytes: int) -> None:
        self.num_bytes += copy_bytes
        self._room_for_copies_bytes -= copy_bytes

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

    def __init__(self, dtype: torch.dtype, ranks: Ranks = ALONE) -> None:
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
        ranks: Ranks = ALONE,
        on_read: Callable[[], None] = lambda: None,
        room_for_copies_bytes: int = 0,
    ) -> None:
        """`on_read`: called after each tensor, whose pages are in memory then."""
        super().__init__(dtype, device, ranks)
        self._room_for_copies_bytes = room_for_copies_bytes
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
