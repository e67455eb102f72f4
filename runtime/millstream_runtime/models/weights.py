"""What a model asks of a checkpoint: tensors by name and shape, in the engine's dtype, device and layout.

A family's `build` runs twice over the same code, so that names and shapes are written down once:

    ExpectedWeights   meta tensors; notes every name, shape and byte -> the memory estimate and `Checkpoint.check`
    LoadedWeights     the tensors themselves, after the whole checkpoint was checked
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from millstream_runtime.models.checkpoint import Checkpoint, check_finite
from millstream_runtime.models.linear import Linear


class Weights(ABC):
    """Attributes: `num_bytes`, what the tensors handed out so far take on the device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.num_bytes = 0

    @abstractmethod
    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor of the checkpoint on `device`, in the file's dtype. It may be the mapped file: copy it."""

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for a weight, counted in `num_bytes`."""
        room = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.num_bytes += room.numel() * room.element_size()
        return room

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """As it is in the checkpoint, but never the mapped file itself: that may be replaced under a running server."""
        return self.empty(*shape, dtype=dtype).copy_(self._read(name, shape))

    def wide_tensor(self, name: str, *shape: int) -> Tensor:
        """`tensor` in at least float32, for the little weights whose rounding would show."""
        return self.tensor(name, *shape, dtype=torch.promote_types(self.dtype, torch.float32))

    def linear(self, parts: Mapping[str, int], in_features: int, bias: bool = False) -> Linear:
        """Linears that share their input (name to outputs), side by side in one weight `[in, sum of outs]`."""
        weight = self.empty(in_features, sum(parts.values()))
        self._fill(weight, parts, in_features)
        if not bias:
            return Linear(weight, None)
        biases = [self._read(f"{name}.bias", (out_features,)).to(self.dtype) for name, out_features in parts.items()]
        return Linear(weight, self.empty(sum(parts.values())).copy_(self._joined(biases)))

    def stacked_linear(self, experts: Sequence[Mapping[str, int]], in_features: int) -> Tensor:
        """The weights of `linear` for each expert: `[experts, in, sum of outs]`."""
        weights = self.empty(len(experts), in_features, sum(experts[0].values()))
        for weight, parts in zip(weights, experts, strict=True):
            self._fill(weight, parts, in_features)
        return weights

    def _fill(self, weight: Tensor, parts: Mapping[str, int], in_features: int) -> None:
        """Whole and in one dtype before it is transposed: torch has a fast path for exactly that."""
        rows = [
            self._read(f"{name}.weight", (out_features, in_features)).to(self.dtype)
            for name, out_features in parts.items()
        ]
        weight.copy_((rows[0] if len(rows) == 1 else self._joined(rows)).t())

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Side by side along the first dimension."""
        return torch.cat(list(parts))


class ExpectedWeights(Weights):
    """No data, only demands. `expected`: name and shape of every tensor that the checkpoint must hold."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, torch.device("meta"))
        self.expected: dict[str, tuple[int, ...]] = {}

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.expected[name] = shape
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        # On meta tensors, torch.cat first imports torch's symbolic shapes: five seconds of every start.
        return torch.empty(sum(len(part) for part in parts), *parts[0].shape[1:], dtype=self.dtype, device="meta")


class LoadedWeights(Weights):
    """Tensors of a checkpoint that was checked before."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._checkpoint = checkpoint

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        source = self._checkpoint.read(name)
        check_finite(name, source)
        return source.to(self.device)
