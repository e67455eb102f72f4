"""What keys and values depend on besides tokens: where the chain of hashes of the prefix cache begins."""

from __future__ import annotations

import hashlib
import json

import torch

from millstream_runtime.config import KVCacheDType
from millstream_runtime.kv_layout import KVLayout
from millstream_runtime.models.config.model_config import ModelConfig

LAYOUT = "heads-first-1"  # of `KVCache.heads`; another number for any other order of a block's bytes


def prefix_root(
    checkpoint_digest: bytes,
    config: ModelConfig,
    dtype: torch.dtype,
    block_size_tokens: int,
    num_ranks: int,
    layout: KVLayout | None = None,
    stored: KVCacheDType = KVCacheDType.AUTO,
) -> bytes:
    """Return 32 bytes that differ wherever blocks of equal tokens would hold other bytes.

    How long requests may be is left out: what depends on a request's length is in `Sequence.kv_variant`.

    Args:
        num_ranks: among whom the heads of a block are divided.
        layout: which layers a block holds; None: all.
        stored: how numbers are stored; what scales there are is in the checkpoint.
    """
    parts = [
        checkpoint_digest.hex(),
        config.architecture,
        config.num_layers,
        config.kv_shape,
        repr(config.rope),
        config.windows,
        str(dtype),
        block_size_tokens,
        num_ranks,
        LAYOUT,
        stored.value,
        None if layout is None else [layout.windows, layout.group_of, layout.place_of],
    ]
    return hashlib.sha256(b"millstream kv\0" + json.dumps(parts).encode()).digest()
