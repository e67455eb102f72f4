"""Checkpoints of tiny models in published formats, packed by plain loops written from the formats' descriptions.

`quantized` writes two folders of one model: packed, and with the dequantized weights in 64 bits. What the runtime
computes with both must be the same.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LINEAR = re.compile(r"model\.layers\.\d+\..*(?:_proj|_proj_with_mqa|\.w[123])\.weight")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Packer = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]  # module, weight -> tensors, dequantized weight


@dataclass(frozen=True)
class Rounded:
    """A weight `[in, out]` in integers: `codes`, and for each group `scales` and `zeros` `[groups, out]`."""

    codes: Tensor  # int64 [in, out]
    scales: Tensor  # float16
    zeros: Tensor  # int64
    groups: Tensor  # int64 [in]

    @property
    def dequantized(self) -> Tensor:
        """`[out, in]`, float64."""
        return ((self.codes - self.zeros[self.groups]) * self.scales.double()[self.groups]).t().contiguous()


def quantized(folder: Path, packed: Path, settings: dict[str, Any], pack: Packer, keep: str = "") -> Path:
    """Write `packed` and, next to it, the folder that is returned. Modules with `keep` in their name are not packed."""
    dense = packed.with_name(packed.name + "-dense")
    for copy in (packed, dense):
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored = {name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()}
    tensors: dict[str, Tensor] = {}
    for name, weight in stored.items():
        if LINEAR.fullmatch(name) and not (keep and keep in name):
            module = name.removesuffix(".weight")
            of_module, stored[name] = pack(module, weight)
            tensors |= {f"{module}.{key}": one.contiguous() for key, one in of_module.items()}
        else:
            tensors[name] = weight
    save_file(tensors, packed / "model.safetensors")
    save_file(stored, dense / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return dense


def round_to_groups(weight: Tensor, bits: int, groups: Tensor, *, symmetric: bool = False) -> Rounded:
    """Round to nearest, `weight` `[out, in]`; `groups`: of each input."""
    by_input, highest = weight.t().double(), (1 << bits) - 1
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        rows = by_input[groups == group]
        low, high = rows.amin(0).clamp(max=0), rows.amax(0).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / highest).clamp(min=1e-4).half()
        scales.append(scale)
        middle = torch.full_like(low, 1 << (bits - 1))
        zeros.append((middle if symmetric else (-low / scale.double()).round()).clamp(0, highest).long())
    scale_rows, zero_rows = torch.stack(scales), torch.stack(zeros)
    codes = (by_input / scale_rows.double()[groups]).round() + zero_rows[groups]
    return Rounded(codes.clamp(0, highest).long(), scale_rows, zero_rows, groups)


def in_order(num_inputs: int, group_size: int) -> Tensor:
    """The group of each input where groups are runs; -1: all are one group."""
    return torch.arange(num_inputs) // (group_size if group_size > 0 else num_inputs)


def awq(group_size: int) -> Packer:
    """AutoAWQ's GEMM packing: output `order[i]` of eight goes into half-byte `i`."""

    def pack_outputs(codes: Tensor) -> Tensor:
        numbers = codes.numpy().astype(np.uint32)
        words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=np.uint32)
        for word in range(words.shape[1]):
            for place in range(8):
                words[:, word] |= numbers[:, word * 8 + AWQ_ORDER[place]] << np.uint32(4 * place)
        return torch.from_numpy(words.astype(np.int32))

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rounded = round_to_groups(weight, 4, in_order(weight.shape[1], group_size))
        tensors = {"qweight": pack_outputs(rounded.codes), "qzeros": pack_outputs(rounded.zeros)}
        return tensors | {"scales": rounded.scales}, rounded.dequantized

    return pack


def gptq(bits: int, group_size: int, *, act_order: bool = False, version: int = 1, symmetric: bool = False) -> Packer:
    """AutoGPTQ's packing; version 1 stores zero points minus one, modulo 2 ** bits."""

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = in_order(weight.shape[1], group_size)
        if act_order:
            seed = sum(map(ord, module))  # each module in an order of its own
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))]
        rounded = round_to_groups(weight, bits, groups, symmetric=symmetric)
        stored_zeros = (rounded.zeros - (1 if version == 1 else 0)) % (1 << bits)
        tensors = {
            "qweight": consecutive(rounded.codes.t(), bits).t(),
            "qzeros": consecutive(stored_zeros, bits),
            "scales": rounded.scales,
            "g_idx": groups.to(torch.int32),
        }
        return tensors, rounded.dequantized

    return pack


def consecutive(codes: Tensor, bits: int) -> Tensor:
    """Codes that follow one another along the last dimension in one word, the first in its lowest bits."""
    numbers, per_word = codes.numpy().astype(np.uint32), 32 // bits
    words = np.zeros((numbers.shape[0], -(-numbers.shape[1] // per_word)), dtype=np.uint32)
    for column in range(numbers.shape[1]):
        words[:, column // per_word] |= numbers[:, column] << np.uint32(bits * (column % per_word))
    return torch.from_numpy(words.astype(np.int32))
