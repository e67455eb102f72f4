"""The kernels that were compiled for a CPU, where this machine can run them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from millstream_kernels.cpu.code_folder import CodeError

if TYPE_CHECKING:
    from millstream_kernels.cpu.loaded_code import LoadedCode


@cache
def load() -> tuple[LoadedCode | None, str | None]:
    """Return the code, or None and why torch computes what its kernels would."""
    try:
        from millstream_kernels.cpu import decode

        return decode.load(), None
    except ImportError as error:
        return None, f"{error.name} is not installed"
    except CodeError as error:
        return None, str(error)
