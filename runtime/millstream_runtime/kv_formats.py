"""How the KV cache stores numbers, and what a token takes.

    None    as the model computes: 16 or 32 bits per number
    FP8     float8_e4m3, divided by a static scale of the layer's keys or values: 8 bits per number
    INT8    8-bit integers and one float16 scale per token and head (MLA: per token): 8 bits and 16 / head size

The planner counts with it what the engine allocates, so it imports nothing but the standard library.
"""

from __future__ import annotations

INT8_SCALE_BYTES = 2
FLOAT32_BYTES = 4


def kv_token_bytes(method: str, num_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Return the bytes that one token keeps in one layer.

    Args:
        method: in the words of the API: None, FP8 or INT8.
        num_heads: of keys and values together; 1 where all heads share a latent.
        dtype_bytes: of one number of the model's arithmetic.

    Raises:
        ValueError: an unknown method.
    """
    if method == "None":
        return num_heads * head_dim * dtype_bytes
    if method == "FP8":
        return num_heads * head_dim
    if method == "INT8":
        return num_heads * (head_dim + INT8_SCALE_BYTES)
    raise ValueError(f"no format of the KV cache is called {method!r}")


def dequantizing_bytes(method: str, num_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Return what a dequantized copy of one token in one layer takes in addition to its numbers, while torch makes it.

    A copy of codes and scales, the scales in float32, and the numbers in float32 where the model has 16 bits: scaled,
    then rounded. The arguments are those of `kv_token_bytes`.
    """
    if method == "None":
        return 0
    numbers_bytes = num_heads * head_dim * FLOAT32_BYTES if dtype_bytes < FLOAT32_BYTES else 0
    return kv_token_bytes(method, num_heads, head_dim, dtype_bytes) + num_heads * FLOAT32_BYTES + numbers_bytes
