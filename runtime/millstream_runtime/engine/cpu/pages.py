"""Zeroed memory for a KV pool on a CPU, of which a page takes memory only once a request writes to it.

Small pages, whatever the machine's rule: with huge ones (numpy asks for them) the first token of each head in each
layer would zero and keep 2 MiB.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that the kernel maps page by page."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)  # which keeps the pages
