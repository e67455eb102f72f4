"""Masks as views of one line: a causal mask, with a window or without, is the same row shifted by one per query.

    line      -inf ... -inf   0 ... 0          -inf ... -inf
                              window (or all)  ^ a query at position p has its first p + 1 places before this

Queries are taken from the last to the first, so that the rows of their mask begin one place further each:

    position 5   [ 0 0 0 0 0 0 ]
    position 4     [ 0 0 0 0 0 -inf ]              two rows of a mask over 6 keys, both on the line
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=32)
def mask_line(most_tokens: int, window: int | None, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, int]:
    """What a query at the end of its window adds to the scores of the tokens before, in and after it, and where `after`
    begins: `[2 * most_tokens]`."""
    zeros = most_tokens if window is None else min(window, most_tokens)
    line = torch.full((2 * most_tokens,), float("-inf"), dtype=dtype, device=device)
    line[most_tokens - zeros : most_tokens] = 0.0
    return line, most_tokens


def line_for(num_tokens: int, window: int | None, like: Tensor) -> tuple[Tensor, int]:
    """`mask_line` for sequences of up to `num_tokens`, of a size that lasts for many steps."""
    return mask_line(1 << (num_tokens - 1).bit_length(), window, like.dtype, like.device)


def causal_mask(num_queries: int, keys: slice, window: int | None, like: Tensor) -> Tensor:
    """What the queries at the positions `keys.stop - 1`, `keys.stop - 2`, ... add to the scores of `keys`.

    Returns:
        `[num_queries, keys]` in the dtype of `like`. On a CPU a view that takes no memory; the kernels of a GPU want
        rows that begin at aligned addresses, so there it is a copy.
    """
    line, line_end = line_for(keys.stop, window, like)
    view = line.as_strided((num_queries, keys.stop - keys.start), (1, 1), line_end - keys.stop + keys.start)
    return view if like.device.type == "cpu" else view.contiguous()


@lru_cache(maxsize=32)
def tree_mask(parents: tuple[int, ...], window: int | None, dtype: torch.dtype) -> Tensor:
    """What the last known token and each draft of a tree add to the scores of the drafts, `[1 + drafts, drafts]`, on a
    CPU: 0 for itself and those before it on its path, as far as the window reaches. Do not change it.

    `parents`: see `AttentionChunk`.
    """
    mask = torch.full((1 + len(parents), len(parents)), float("-inf"), dtype=dtype)
    for draft in range(len(parents)):
        seen, distance = draft, 0
        while seen >= 0 and (window is None or distance < window):
            mask[1 + draft, seen] = 0.0
            seen, distance = parents[seen], distance + 1
    return mask
