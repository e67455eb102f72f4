"""Products of few rows on several threads of a CPU.

MKL multiplies few rows by a matrix on one thread, however many it may use, though reading the matrix is what takes the
time and one core cannot take all that memory gives. A batch of products it does divide among threads. So the
matrix is taken as a batch of its row blocks, each a run of memory, and what they give is added up:

    x @ W = x[:, :K/2] @ W[:K/2] + x[:, K/2:] @ W[K/2:]

On two threads that is 1.2 to 2.4 times as fast for 1 to 4 rows, and 1.0 to 1.4 for 8 (`python -m benchmarks.layouts`).
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_ROWS = 8  # beyond them MKL's own way is as fast
LEAST_PART_ELEMENTS = 1 << 16  # below it waking a thread takes longer than it saves


def num_parts(x: Tensor, weight: Tensor) -> int:
    """Into how many row blocks `weight` `[in, out]` is cut for `x` `[T, in]`; 1: not at all."""
    if x.shape[0] > MOST_ROWS or x.device.type != "cpu" or x.dtype != torch.float32:
        return 1
    parts = min(torch.get_num_threads(), weight.numel() // LEAST_PART_ELEMENTS)
    while parts > 1 and weight.shape[0] % parts:
        parts -= 1
    return max(1, parts)


def split_product(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """`[T, in]` times `[in, out]`, whose rows follow one another in memory; `parts` divides `in`."""
    size = weight.shape[0] // parts
    rows = torch.unflatten(x, 1, (parts, size)).transpose(0, 1)
    return torch.bmm(rows, torch.unflatten(weight, 0, (parts, size))).sum(0)
