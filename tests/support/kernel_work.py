"""Bytes, FLOPs and launches of each kernel of `millstream_kernels`; docs/kernels.md lists what they cost at best.

Each is what its kernel's docstring says, for one launch and one layer, without what caches on the chip serve.
"""

from __future__ import annotations

from millstream_runtime.roofline import Work

CODE_BYTES, SCALE_BYTES = 1, 4  # of a quantized output: per number, per row
GROUP_BYTES = 4  # scale and zero point of a group of 4-bit weights


def attention(
    num_queries: int,
    pairs: int,
    cached_tokens: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_bytes: float = 2,
) -> Work:
    """Paged decode or prefill attention of one layer, with queries and outputs of 16 bits.

    Args:
        num_queries: rows of queries in all.
        pairs: of a query and a token that it sees.
        cached_tokens: whose keys and values are read, each once.
        kv_bytes: of a number of the cache.
    """
    cache = 2 * num_kv_heads * head_dim * cached_tokens * kv_bytes
    rows = 2 * num_queries * num_heads * head_dim * 2
    return Work(cache + rows, 4 * num_heads * head_dim * pairs, 1)


def latent_attention(num_queries: int, cached_tokens: int, *, num_heads: int, latent_dim: int, rotary_dim: int) -> Work:
    """Absorbed attention of 16 bits; every query sees all cached tokens, which are read once."""
    size = latent_dim + rotary_dim
    rows = num_queries * num_heads * (size + latent_dim) * 2
    flops = 2 * num_heads * (size + latent_dim) * num_queries * cached_tokens
    return Work(size * cached_tokens * 2 + rows, flops, 1)


def linear(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    *,
    bits: int = 16,
    group_size: int = 0,
    quantizes_inputs: bool = True,
) -> Work:
    """A product. `bits`: of a weight; `group_size`: of its groups, 0 without. Inputs of 8 bits by weights of 8 bits,
    unless not `quantizes_inputs`; else of 16."""
    groups = -(-num_inputs // group_size) * num_outputs * GROUP_BYTES if group_size else 0
    weights = num_outputs * num_inputs * bits / 8 + groups
    rows = num_rows * (num_inputs * (1 if bits == 8 and quantizes_inputs else 2) + num_outputs * 2)
    return Work(weights + rows, 2 * num_rows * num_outputs * num_inputs, 1)


def rms_norm(num_rows: int, size: int, *, residual: bool = False, quantized: bool = False) -> Work:
    """A norm of 16-bit rows; a residual is read and written too."""
    written = size * CODE_BYTES + SCALE_BYTES if quantized else size * 2
    return Work(num_rows * (size * 2 + written + (4 * size if residual else 0)), 4 * num_rows * size, 1)


def gated_activation(num_rows: int, size: int, *, quantized: bool = False) -> Work:
    """`activation(gate) * up` of 16 bits, to rows of `size` numbers."""
    written = size * CODE_BYTES + SCALE_BYTES if quantized else size * 2
    return Work(num_rows * (2 * size * 2 + written), 10 * num_rows * size, 1)


def rope_kv_write(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, *, kv_bytes: float = 2) -> Work:
    """Queries and keys turned, keys and values stored."""
    read = (num_heads + 2 * num_kv_heads) * 2
    written = num_heads * 2 + 2 * num_kv_heads * kv_bytes
    return Work(num_tokens * head_dim * (read + written), 6 * num_tokens * head_dim * (num_heads + num_kv_heads), 1)


def sample(num_rows: int, vocab_size: int, *, passes: int = 1, element_bytes: int = 2) -> Work:
    """Logits of `num_rows` rows. Only the first of `passes` comes from memory, where a row fits the L2 cache."""
    return Work(num_rows * vocab_size * element_bytes, 40 * num_rows * vocab_size * passes, 1)
