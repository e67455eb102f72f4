"""How the KV cache stores numbers, and what a token takes.

    None    as the model computes: 16 or 32 bits per number
    FP8     float8_e4m3, divided by a static scale of the layer's keys or values: 8 bits per number
    INT8    8-bit integers and one float16 scale per token and head (MLA: per token): 8 bits and 16 / head size

The planner counts with it what the engine allocates, so it imports nothing but the standard library.
"""

from __future__ import annotations

INT8_SCALE_BYTES = 2


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
