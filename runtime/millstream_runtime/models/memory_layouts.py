"""Which memory layout linear weights have on which device: the only module that imports `models.cpu`."""

from __future__ import annotations

import torch

from millstream_runtime.models.cpu.linear import CpuLayout
from millstream_runtime.models.linear.linear import MemoryLayout, OutputMajorLayout, PlainLayout


def memory_layout_for(device: torch.device, dtype: torch.dtype, copy_budget_bytes: int) -> MemoryLayout:
    """Return a new layout for one model. `copy_budget_bytes`: what second copies of weights may take."""
    if device.type == "cpu":
        return CpuLayout(dtype, copy_budget_bytes)
    return OutputMajorLayout() if device.type == "cuda" else PlainLayout()
