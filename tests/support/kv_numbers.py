"""What other code never does to a KV pool: write bad numbers into its blocks, in whatever format they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from millstream_runtime.engine.kv.kv_cache import KVCache

FP8_NAN = 0x7F  # the bits of float8_e4m3fn


def spoil_blocks(cache: KVCache, blocks: Sequence[int] | slice) -> None:
    """Make every number of these blocks NaN: the number itself, its scale, or its code where that can be NaN."""
    for tensor in cache._by_block:
        if tensor.dtype.is_floating_point:
            tensor[blocks] = float("nan")
        elif tensor.dtype == torch.uint8:
            tensor[blocks] = FP8_NAN
