"""What all quantized layouts share: parts are unpacked to one form, joined, and made into the layer of a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.logs import log
from millstream_runtime.models.linear.linear import Linear
from millstream_runtime.models.linear.several import SideBySideLinear
from millstream_runtime.models.linear.shares import Cut, Size, kept_size
from millstream_runtime.quantization.grouped_weight import GroupedWeight, pack_halves, runs_of
from millstream_runtime.quantization.implementations import linear_for
from millstream_runtime.quantization.quantized_linear import PlannedLinear
from millstream_runtime.quantization.weight_layout import TensorSource

LARGEST_CODES: dict[torch.dtype, float] = {torch.int8: 128, torch.float8_e4m3fn: 448}


@dataclass(frozen=True, slots=True)
class Unpacked:
    """This rank's part of one module, one code per element."""

    codes: Tensor  # uint8, int8 or float8_e4m3fn [in, out]
    scales: Tensor  # floats [groups, columns]
    scales_name: str  # of the tensor that they come from, for messages
    zeros: Tensor | int  # uint8 [groups, out], or one for all
    groups: Tensor  # int64 [in]: the row of `scales` of each input
    columns: Tensor | None = None  # int32 [out]: the column of `scales` of each output; None: its own


class QuantizedLayout(ABC):
    """See `WeightLayout`. A format says how its tensors are called and how they are unpacked."""

    bits: int
    code_values: ClassVar[tuple[float, ...] | None] = None  # what codes of 4 bits stand for; None: numbers from 0 on
    quantizes_activations: bool = False  # see `GroupedWeight`

    @abstractmethod
    def unpack(self, source: TensorSource, module: str, outputs: Size, inputs: Size) -> Unpacked | None:
        """Read one module. None on the meta device, where only the demands count.

        Raises:
            RuntimeFailure: CheckpointInvalid; the message names the tensor.
        """

    @abstractmethod
    def planned_bytes(self, outputs: Size, inputs: Size) -> int:
        """Bytes that the module takes in memory, with 16-bit scales where the format leaves their dtype open."""

    def linear(self, source: TensorSource, parts: Mapping[str, Size], in_features: Size, bias: Tensor | None) -> Linear:
        unpacked = [self.unpack(source, module, size, in_features) for module, size in parts.items()]
        found = [self._in_range(one, source.dtype) for one in unpacked if one is not None]
        if len(found) < len(unpacked):
            source.count(sum(self.planned_bytes(size, in_features) for size in parts.values()))
            return PlannedLinear(bias)
        if all(torch.equal(one.groups, found[0].groups) for one in found[1:]):
            return linear_for(source, self._grouped(found), bias)
        # Act-order sorts the inputs of each part in its own way.
        sizes = list(map(kept_size, parts.values()))
        biases = [None] * len(sizes) if bias is None else list(torch.split(bias, sizes))
        each = zip(found, biases, strict=True)
        return SideBySideLinear(tuple(linear_for(source, self._grouped([one]), its) for one, its in each))

    def dense_weight(self, source: TensorSource, module: str, out_features: Size, in_features: Size) -> Tensor:
        unpacked = self.unpack(source, module, out_features, in_features)
        weight = source.empty(kept_size(out_features), kept_size(in_features))
        if unpacked is not None:
            log.info("dequantized_once", module=module, about="it is not computed as one product")
            unpacked = self._in_range(unpacked, source.dtype)
            weight.copy_(self._grouped([unpacked]).dense(source.dtype).t())
        return weight

    def _in_range(self, unpacked: Unpacked, dtype: torch.dtype) -> Unpacked:
        """Refuse scales with which a weight of the model's dtype would be infinite."""
        largest_code = LARGEST_CODES.get(unpacked.codes.dtype, (1 << self.bits) - 1)
        if self.code_values is not None:
            largest_code = max(map(abs, self.code_values))
        largest_scale = float(unpacked.scales.abs().max())
        if largest_scale * largest_code > torch.finfo(dtype).max:
            raise invalid_tensor(
                unpacked.scales_name,
                f"holds a scale of {largest_scale:.3g}; with codes up to {largest_code:g} weights are beyond {dtype}",
            )
        return unpacked

    def _grouped(self, parts: list[Unpacked]) -> GroupedWeight:
        """The parts side by side, which have equal groups; inputs sorted by group."""
        first = parts[0]
        order = None
        groups, codes = first.groups, _side_by_side([one.codes for one in parts])
        if bool((groups[1:] < groups[:-1]).any()):
            order = groups.argsort(stable=True)
            groups = groups[order]
            codes = codes.view(torch.uint8)[order].view(codes.dtype)
            order = order.to(torch.int32)
        zeros: Tensor | int = first.zeros
        if isinstance(zeros, Tensor):
            zeros = torch.cat([one.zeros for one in parts if isinstance(one.zeros, Tensor)], dim=1)
            zeros = pack_halves(zeros) if self.bits == 4 else zeros
        return GroupedWeight(
            codes=pack_halves(codes) if self.bits == 4 else codes,
            scales=torch.cat([one.scales for one in parts], dim=1),
            zeros=zeros,
            runs=runs_of(groups),
            num_outputs=codes.shape[1],
            bits=self.bits,
            order=order,
            columns=_columns(parts),
            quantizes_activations=self.quantizes_activations,
            values=None if self.code_values is None else torch.tensor(self.code_values, device=codes.device),
        )


def packed(size: Size, per_word: int, module: str) -> Size:
    """The words that hold `size` codes, `per_word` in each.

    Raises:
        RuntimeFailure: CheckpointInvalid, the module does not fill its words.
        InvalidConfigError: the share of a rank begins or ends within a word.
    """
    total = size if isinstance(size, int) else size.total
    if total % per_word:
        raise RuntimeFailure(
            FailureReason.CHECKPOINT_INVALID,
            f"{module} has a dimension of {total}, which is no multiple of the {per_word} weights that the format "
            "packs into one word; quantization_config does not belong to this model.",
        )
    if isinstance(size, int):
        return size // per_word
    for one in size.kept:
        if one.start % per_word or one.stop % per_word:
            raise InvalidConfigError(
                f"--tensor-parallel-size cuts {module} at {one.start}..{one.stop}, within a packed word of {per_word} "
                "weights; choose a smaller size."
            )
    return Cut(total // per_word, tuple(range(one.start // per_word, one.stop // per_word) for one in size.kept))


def groups_within(inputs: Size, group_size: int | None) -> tuple[Size, Tensor]:
    """The groups that a rank's inputs belong to, and for each input its group among these, int64 `[in]`.

    A share may begin or end within a group.
    """
    first, last, total = span_of(inputs)
    size = group_size or total
    begin, end = first // size, -(-last // size)
    kept: Size = end if (begin, end) == (0, -(-total // size)) else Cut(-(-total // size), (range(begin, end),))
    return kept, torch.arange(first, last) // size - begin


def unpack_words(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 `[rows, words]` to codes, uint8 `[rows, words * 32 / bits]`.

    `order`: code `i` of a word lies at place `order[i]`; by default code 0 is the lowest.
    """
    per_word = 32 // bits
    codes = torch.empty(*words.shape, per_word, dtype=torch.uint8, device=words.device)
    for code, place in enumerate(order or range(per_word)):
        codes[..., code] = (words >> place * bits) & ((1 << bits) - 1)  # the mask undoes the shift's sign extension
    return codes.flatten(1)


def invalid_tensor(name: str, what: str) -> RuntimeFailure:
    """A tensor whose values contradict the others: the sentence names it."""
    return RuntimeFailure(
        FailureReason.CHECKPOINT_INVALID, f"Tensor {name} {what}; fetch or quantize the checkpoint again."
    )


def span_of(inputs: Size) -> tuple[int, int, int]:
    """First and end of the inputs that are kept, and how many there are. Inputs are never cut in several places."""
    if isinstance(inputs, int):
        return 0, inputs, inputs
    (kept,) = inputs.kept
    return kept.start, kept.stop, inputs.total


def _side_by_side(codes: list[Tensor]) -> Tensor:
    if len(codes) == 1:
        return codes[0]
    return torch.cat([one.view(torch.uint8) for one in codes], dim=1).view(codes[0].dtype)


def _columns(parts: list[Unpacked]) -> Tensor | None:
    found, start = [], 0
    for one in parts:
        if one.columns is None:
            return None  # equal layouts have columns in all parts or in none
        found.append(one.columns + start)
        start += one.scales.shape[1]
    return torch.cat(found).to(torch.int32)
