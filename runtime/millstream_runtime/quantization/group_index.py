"""The group of each input: its number by the group's size, or what a checkpoint stores for act-order."""

from __future__ import annotations

import torch
from torch import Tensor

from millstream_runtime.models.linear.shares import Size, total_size
from millstream_runtime.quantization.quantized_layout import groups_within, invalid_tensor
from millstream_runtime.quantization.weight_layout import TensorSource


def groups_of(
    source: TensorSource, name: str, inputs: Size, group_size: int | None, *, is_required: bool
) -> tuple[Size, Tensor]:
    """Return which groups a rank reads scales of, and for each of its inputs its group among these, int64 `[in]`.

    `name`: of the stored index. Where it differs from the order of the inputs, a rank reads the scales of all groups,
    because its inputs belong to any of them.

    Raises:
        RuntimeFailure: CheckpointInvalid, the index names a group without scales.
    """
    groups, group_of_input = groups_within(inputs, group_size)
    index = (source.read if is_required else source.read_optional)(name, (inputs,), ("I32", "I64"))
    if source.device.type == "meta":
        return (total_size(groups) if is_required else groups), group_of_input
    if index is None:
        return groups, group_of_input
    stored = _checked(index, name, total_size(groups))
    first = 0 if isinstance(groups, int) else groups.kept[0].start
    if torch.equal(stored - first, group_of_input):
        return groups, group_of_input
    return total_size(groups), stored


def _checked(index: Tensor, name: str, num_groups: int) -> Tensor:
    """As int64, each a group that there are scales for."""
    index = index.long()
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= num_groups:
        wrong = low if low < 0 else high
        raise invalid_tensor(name, f"names group {wrong}, but there are scales for groups 0 to {num_groups - 1}")
    return index
