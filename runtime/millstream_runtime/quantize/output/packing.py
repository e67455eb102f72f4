"""The published formats: which modules each can hold, their packed tensors, and its `quantization_config`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from millstream_runtime.quantization.awq import PER_WORD, PLACES
from millstream_runtime.quantization_config.scheme import HEAD
from millstream_runtime.quantize.methods.rounding import GroupedCodes
from millstream_runtime.quantize.model_outline import LayerOutline, LinearGroup, ModelOutline
from millstream_runtime.quantize.settings import GROUP_SIZES, ActOrder

BITS = 4


class Packing(Protocol):
    """A format that quantized modules are written in."""

    def described(self) -> dict[str, object]:
        """Its settings, for people."""

    def fits(self, group: LinearGroup) -> bool:
        """Whether the format can hold these modules; others stay as they are in the model."""

    def needs(self) -> str:
        """What sizes it can hold, for a message."""

    def planned_bytes(self, num_inputs: int, outputs: int) -> int:
        """Bytes of a module's tensors in the file."""

    def config(self, outline: ModelOutline, choice: ModuleChoice) -> dict[str, Any]:
        """`quantization_config` of config.json."""


class AwqPacking:
    """AutoAWQ's GEMM packing, which is the most widely loaded one with zero points; see `quantization.awq`."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def described(self) -> dict[str, object]:
        return {"bits": BITS, "group size": self.group_size}

    def fits(self, group: LinearGroup) -> bool:
        return fits_words_and_groups(group, self.group_size)

    def needs(self) -> str:
        return needs_of_groups(self.group_size)

    def planned_bytes(self, num_inputs: int, outputs: int) -> int:
        num_groups = num_inputs // self.group_size
        return num_inputs * outputs // 2 + num_groups * outputs * 5 // 2

    def pack(self, module: str, codes: GroupedCodes) -> dict[str, Tensor]:
        return {
            f"{module}.qweight": pack_words(codes.codes.t(), BITS, PLACES),
            f"{module}.qzeros": pack_words(codes.zeros.t(), BITS, PLACES),
            f"{module}.scales": codes.scales.t().to(torch.float16).contiguous(),
        }

    def config(self, outline: ModelOutline, choice: ModuleChoice) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": BITS,
            "group_size": self.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": [*choice.kept(outline), HEAD],
        }


class GptqPacking:
    """AutoGPTQ's first version, which stores zero points minus one; see `quantization.gptq`. Zero points are in the
    middle: kernels of some servers ask for that."""

    def __init__(self, group_size: int, act_order: ActOrder) -> None:
        self.group_size = group_size
        self.act_order = act_order

    def described(self) -> dict[str, object]:
        return {"bits": BITS, "group size": self.group_size, "act-order": self.act_order.value}

    def fits(self, group: LinearGroup) -> bool:
        return fits_words_and_groups(group, self.group_size)

    def needs(self) -> str:
        return needs_of_groups(self.group_size)

    def planned_bytes(self, num_inputs: int, outputs: int) -> int:
        num_groups = num_inputs // self.group_size
        return num_inputs * outputs // 2 + num_groups * outputs * 5 // 2 + 4 * num_inputs

    def pack(self, module: str, codes: GroupedCodes) -> dict[str, Tensor]:
        stored_zeros = (codes.zeros.to(torch.int32) - 1) & ((1 << BITS) - 1)
        return {
            f"{module}.qweight": pack_words(codes.codes, BITS).t().contiguous(),
            f"{module}.qzeros": pack_words(stored_zeros.t(), BITS),
            f"{module}.scales": codes.scales.t().to(torch.float16).contiguous(),
            f"{module}.g_idx": codes.group_of_input.to(torch.int32),
        }

    def config(self, outline: ModelOutline, choice: ModuleChoice) -> dict[str, Any]:
        found: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": BITS,
            "group_size": self.group_size,
            "desc_act": self.act_order is ActOrder.GROUP,
            "static_groups": self.act_order is ActOrder.STATIC,
            "sym": True,
            "lm_head": False,
            "checkpoint_format": "gptq",
        }
        if choice.unfit or choice.others:
            found["modules_in_block_to_quantize"] = [[*choice.packed]]
        return found


def pack_words(codes: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Codes `[rows, columns]` to int32 `[rows, columns * bits / 32]`: the inverse of `unpack_words`."""
    per_word = 32 // bits
    by_word = codes.to(torch.int32).reshape(len(codes), -1, per_word)
    words = torch.zeros(by_word.shape[:2], dtype=torch.int32, device=codes.device)
    for code, place in enumerate(order or range(per_word)):
        words |= by_word[..., code] << place * bits  # the highest code reaches the sign bit, as in the format
    return words


def fits_words_and_groups(group: LinearGroup, group_size: int) -> bool:
    """Whether modules can be stored in packed words of outputs and whole groups of inputs."""
    words = all(outputs % PER_WORD == 0 for outputs in group.outputs.values())
    return words and group.num_inputs % group_size == 0


def needs_of_groups(group_size: int) -> str:
    """What packed words and groups need of a module's sizes, for a message."""
    return f"inputs must be a multiple of the group size {group_size} (--group-size), and outputs one of {PER_WORD}"


def group_size_for(outline: ModelOutline) -> int:
    """Return the largest of GROUP_SIZES that divides the inputs of every linear layer, or the least of them."""
    inputs = {group.num_inputs for layer in outline.layers for group in layer.groups}
    return next((size for size in GROUP_SIZES if all(one % size == 0 for one in inputs)), GROUP_SIZES[-1])


@dataclass(frozen=True, slots=True)
class ModuleChoice:
    """Which modules of a model are quantized: alike in all layers, by their names within a layer.

    Attributes:
        unfit: linear modules whose sizes the format cannot hold, as `mlp.down_proj`.
        others: further matrices of the layers, which other loaders may take for linear modules: routers, MLA's
            `kv_b_proj`.
        packed: the quantized ones.
    """

    unfit: tuple[str, ...]
    others: tuple[str, ...]
    packed: tuple[str, ...]

    def groups(self, layer: LayerOutline) -> list[LinearGroup]:
        """The groups of a layer whose modules are quantized."""
        return [one for one in layer.groups if one.modules[0].removeprefix(layer.prefix) in self.packed]

    def kept(self, outline: ModelOutline) -> list[str]:
        """Names for `quantization_config` of what is not quantized. Some loaders look for a name anywhere in that of a
        module, so `mlp.gate` would keep `mlp.gate_proj`: such a name is given in full, for each layer."""
        found: list[str] = []
        for inner in (*self.unfit, *self.others):
            if any(inner in other for other in self.packed):
                names = ((layer, f"{layer.prefix}{inner}") for layer in outline.layers)
                found += [name for layer, name in names if f"{name}.weight" in layer.tensors]
            else:
                found.append(inner)
        return found


def choose_modules(outline: ModelOutline, packing: Packing) -> ModuleChoice:
    """Return which modules the format can hold in every layer that has them. Those that share an input go together."""
    linear: dict[str, bool] = {}
    others: dict[str, None] = {}
    for layer in outline.layers:
        for group in layer.groups:
            inner = [module.removeprefix(layer.prefix) for module in group.modules]
            fits = packing.fits(group) and all(linear.get(one, True) for one in inner)
            linear |= dict.fromkeys(inner, fits)
        weights = {f"{module}.weight" for group in layer.groups for module in group.modules}
        matrices = sorted(name for name, shape in layer.tensors.items() if len(shape) == 2 and name not in weights)
        others |= dict.fromkeys(name.removeprefix(layer.prefix).removesuffix(".weight") for name in matrices)
    packed = tuple(one for one, fits in linear.items() if fits)
    return ModuleChoice(tuple(one for one, fits in linear.items() if not fits), tuple(others), packed)


def output_bytes(
    outline: ModelOutline, packing: Packing, choice: ModuleChoice, element_bytes: Mapping[str, int]
) -> int:
    """Return about what the output takes on disk. `element_bytes`: of each tensor of the model."""
    total = 0
    quantized: set[str] = set()
    for layer in outline.layers:
        for group in choice.groups(layer):
            quantized |= {f"{module}.weight" for module in group.modules}
            total += sum(packing.planned_bytes(group.num_inputs, outputs) for outputs in group.outputs.values())
    for name, shape in outline.expected.expected.items():
        if name not in quantized and name in element_bytes:
            total += math.prod(shape) * element_bytes[name]
    return total
