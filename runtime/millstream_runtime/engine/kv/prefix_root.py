"""What keys and values depend on besides tokens: where the chain of hashes of the prefix cache begins."""

from __future__ import annotations

import hashlib
import json

import torch

from millstream_runtime.config import KVCacheDType
from millstream_runtime.kv_layout import KVLayout
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.config.model_config import ModelConfig

LAYOUT = "heads-first-1"  # of `KVCache.heads`; another number for any other order of a block's bytes


def prefix_root(
    checkpoint_digest: bytes,
    config: ModelConfig,
    numbers: Arithmetic | torch.dtype,
    block_size_tokens: int,
    num_ranks: int,
    layout: KVLayout | None = None,
    stored: KVCacheDType = KVCacheDType.AUTO,
) -> bytes:
    """Return 32 bytes that differ wherever blocks of equal tokens would hold other bytes.

    How long requests may be is left out: what depends on a request's length is in `Sequence.kv_variant`.

    Args:
        numbers: of the model; a type is that of all.
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
        _words(Arithmetic.of(numbers)),
        block_size_tokens,
        num_ranks,
        LAYOUT,
        stored.value,
        None if layout is None else [layout.windows, layout.group_of, layout.place_of],
    ]
    return hashlib.sha256(b"millstream kv\0" + json.dumps(parts).encode()).digest()


def _words(arithmetic: Arithmetic) -> str:
    if not arithmetic.is_mixed:
        return str(arithmetic.dtype)
    products = "rounded products" if arithmetic.rounds_products else "products"
    return f"{arithmetic.dtype} by {products} of {arithmetic.weights}, kept as {arithmetic.kv_cache}"
