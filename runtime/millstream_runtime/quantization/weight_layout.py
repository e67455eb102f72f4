"""The contract between a format of stored weights and the loader of a model.

A `WeightLayout` knows, for a module such as `model.layers.0.mlp.down_proj`, which tensors the checkpoint holds for it,
their shapes and dtypes, which part of them a rank reads, and the `Linear` that computes with them. The loader chooses a
layout per module and runs it twice: over meta tensors, to learn what the checkpoint must hold and how many bytes that
takes, and over the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from millstream_runtime.models.linear.linear import Linear, MemoryLayout
from millstream_runtime.models.linear.shares import Size
from millstream_runtime.quantization.grouped_weight import GroupedWeight

FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names


class TensorSource(Protocol):
    """Where a layout gets its tensors from."""

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""

    @property
    def weights_dtype(self) -> torch.dtype:
        """What weights are rounded to where `memory` holds them in 16 bits."""

    @property
    def may_round_activations(self) -> bool:
        """Whether a product may round what it multiplies further than `dtype` does, to be quicker."""

    @property
    def may_round_products(self) -> bool:
        """Whether the results of the layer that is made may be rounded to the 16 bits of its weight."""

    @property
    def device(self) -> torch.device:
        """Meta: nothing is computed, only demands and bytes are noted."""

    @property
    def memory(self) -> MemoryLayout:
        """How dense weights lie in memory."""

    def read(self, name: str, shape: tuple[Size, ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor:
        """This rank's part of one tensor, in the file's dtype. It may be the mapped file: copy it."""

    def read_optional(self, name: str, shape: tuple[Size, ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor | None:
        """The same of a tensor that the checkpoint may lack; None on the meta device."""

    def read_scale(self, name: str, shape: tuple[Size, ...]) -> Tensor:
        """The same of a small float tensor, whose dimensions of size one the file may leave out or add."""

    def read_document(self, name: str) -> dict[str, Any] | None:
        """A JSON object that the checkpoint keeps as the bytes of a tensor; None on the meta device.

        Raises:
            RuntimeFailure: CheckpointInvalid, it is none.
        """

    def in_sixteen_bits(self, name: str, shape: tuple[Size, ...]) -> Tensor:
        """This rank's part of one tensor in 16 bits: as in the file, or rounded to `weights_dtype`.

        Raises:
            InvalidConfigError: a number is beyond that type.
        """

    def is_output_major(self, num_elements: int) -> bool:
        """Whether a dense weight of that size is to lie in memory as `[out, in]`, not as `[in, out]`."""

    def linear_of(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The layer of a dense weight `[in, out]`, by a chosen kernel or as `memory` makes it."""

    def packed_linear(self, weight: GroupedWeight, bias: Tensor | None) -> Linear | None:
        """The layer of a quantized weight by a chosen kernel, counted; None: it is left to `implementations`."""

    def count(self, num_bytes: int) -> None:
        """Add to the bytes that the model's weights take."""

    def note_implementation(self, name: str, reason: str) -> None:
        """Count a quantized layer by what computes it and why, for the log and `/ready`."""

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor of the model's dtype for a weight; its bytes are counted."""

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Side by side along the first dimension."""


class WeightLayout(Protocol):
    """How a checkpoint stores the weight of a module. Equal layouts may be joined in one `Linear`."""

    def linear(self, source: TensorSource, parts: Mapping[str, Size], in_features: Size, bias: Tensor | None) -> Linear:
        """Return the layer of modules that share their input (name to outputs), side by side.

        Raises:
            RuntimeFailure: CheckpointInvalid, tensors contradict each other.
            InvalidConfigError: the share of a rank cannot be cut out of the packed tensors.
        """

    def dense_weight(self, source: TensorSource, module: str, out_features: Size, in_features: Size) -> Tensor:
        """Return the weight itself, `[out, in]`, in the model's dtype: for what is computed with in other ways."""
