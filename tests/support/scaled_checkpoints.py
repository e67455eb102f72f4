"""Packers of FP8, INT8 and compressed-tensors, by their descriptions: see `quantized_checkpoints`."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.quantized_checkpoints import Packer, consecutive, in_order, round_to_groups

FP8_MAX, INT8_MAX = 448.0, 127.0


def fp8(scale_name: str, block: tuple[int, int] | None, *, shape: tuple[int, ...] | None = None) -> Packer:
    """float8_e4m3 and a float32 scale per block of outputs and inputs; `None`: one for all. `shape`: of the scale."""

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = block or weight.shape
        expanded, scales = _scales_by_block(weight, rows, columns, FP8_MAX)
        codes = (weight.double() / expanded).to(torch.float8_e4m3fn)
        stored = scales.reshape(shape) if shape is not None else scales
        return {"weight": codes, scale_name: stored}, codes.double() * expanded

    return pack


def int8(scale_name: str, block: tuple[int | None, int | None], *, stored_times: float = 1.0) -> Packer:
    """int8 and a float32 scale per block, `None` being all; the scale is stored times a number (bitsandbytes)."""

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        expanded, scales = _scales_by_block(
            weight, block[0] or weight.shape[0], block[1] or weight.shape[1], INT8_MAX, stored_times
        )
        codes = (weight.double() / expanded).round().clamp(-127, 127).to(torch.int8)
        stored = scales.flatten() if stored_times != 1.0 else scales
        return {"weight": codes, scale_name: stored}, codes.double() * expanded

    return pack


def packed_integers(bits: int, group_size: int, *, symmetric: bool = True, act_order: bool = False) -> Packer:
    """compressed-tensors' pack-quantized."""

    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = in_order(weight.shape[1], group_size)
        if act_order:
            generator = torch.Generator().manual_seed(sum(map(ord, module)))
            groups = groups[torch.randperm(len(groups), generator=generator)]
        rounded = round_to_groups(weight, bits, groups, symmetric=symmetric)
        tensors = {
            "weight_packed": consecutive(rounded.codes.t(), bits),
            "weight_scale": rounded.scales.t(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = consecutive(rounded.zeros, bits).t()
        if act_order:
            tensors["weight_g_idx"] = groups.to(torch.int32)
        return tensors, rounded.dequantized

    return pack


def _scales_by_block(
    weight: Tensor, rows: int, columns: int, largest: float, stored_times: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Of each weight, float64 `[out, in]`, and of each block, float32; blocks at the edges may be smaller."""
    num_rows, num_columns = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    expanded, scales = torch.empty(weight.shape, dtype=torch.float64), torch.empty(num_rows, num_columns)
    for row in range(num_rows):
        for column in range(num_columns):
            place = (slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns))
            scales[row, column] = weight[place].abs().max() / largest * stored_times
            expanded[place] = (scales[row, column] / stored_times).double()
    return expanded, scales
