"""Attention by torch alone, and with the kernel that is compiled for a CPU."""

from __future__ import annotations

import pytest

from millstream_kernels.cpu.decode import load
from millstream_kernels.cpu.loaded_code import LoadedCode


@pytest.fixture(params=["torch", "compiled"])
def compiled_code(request: pytest.FixtureRequest) -> LoadedCode | None:
    return load() if request.param == "compiled" else None
