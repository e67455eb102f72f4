"""Which memory layout linear weights have on which device: the only module that imports `models.cpu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.cpu.bfloat16_linear import Bfloat16Layout
from millstream_runtime.models.cpu.linear import CpuLayout
from millstream_runtime.models.cpu.sixteen_bits import SixteenBitLayout
from millstream_runtime.models.linear.linear import MemoryLayout, OutputMajorLayout, PlainLayout

if TYPE_CHECKING:
    from millstream_kernels.cpu.bfloat16.product import Bfloat16Product
    from millstream_kernels.cpu.loaded_code import LoadedCode


def memory_layout_for(
    device: torch.device,
    arithmetic: Arithmetic,
    copy_budget_bytes: int,
    code: LoadedCode | None = None,
    product: Bfloat16Product | None = None,
) -> MemoryLayout:
    """Return a new layout for one model.

    Args:
        copy_budget_bytes: what second copies of weights may take.
        code: what computes products by weights that a CPU holds in fewer bits than the model computes with.
        product: what computes those of layers that may be rounded.
    """
    if device.type != "cpu":
        return OutputMajorLayout() if device.type == "cuda" else PlainLayout()
    if not arithmetic.is_mixed or code is None:
        return CpuLayout(arithmetic.dtype, copy_budget_bytes)
    if arithmetic.rounds_products and product is not None:
        return Bfloat16Layout(arithmetic.dtype, copy_budget_bytes, code, product)
    return SixteenBitLayout(arithmetic.dtype, copy_budget_bytes, code)


def planned_layout(arithmetic: Arithmetic) -> MemoryLayout:
    """Return the layout by which a model's bytes are counted before a tensor is read."""
    return SixteenBitLayout(arithmetic.dtype, 0, None) if arithmetic.is_mixed else PlainLayout()
