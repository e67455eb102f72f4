"""Plain torch mathematics of every kernel: slow, obvious, and what all others are tested against.

Shapes use these letters everywhere in the runtime and the kernels:

    T  tokens computed in one step, all requests one after another (no padding, no batch dimension)
    H  query heads        KV  key/value heads, H a multiple of KV        D  head size
    B  requests in the step        S  tokens of one KV block

The KV cache of one layer is one tensor `[blocks, S, 2 * KV, D]`: the keys of a token, then its values, so that a
step writes both with one operation. Token `p` of a request lives in block `block_table[p // S]`, place `p % S`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last dimension, accumulated in float32. `x`: `[T, hidden]`; same dtype out.

    Zhang and Sennrich 2019 (arXiv 1910.07467): layer norm without the mean, hence without a bias.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (wide * scale * weight.float()).to(x.dtype)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its position. `x`: `[T, heads, D]`; `cos`, `sin`: `[T, D / 2]`, one angle a pair.

    Su et al. 2021 (arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints: element `i` pairs with
    `i + D/2` (not with `i + 1`, as in the paper).
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def gather_kv(kv_cache: Tensor, block_table: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one request, in order, each `[context_len, KV, D]`. `block_table`: `[blocks]`, int64."""
    tokens = kv_cache[block_table].flatten(0, 1)[:context_len]
    keys, values = tokens.chunk(2, dim=1)
    return keys, values


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: list[Tensor],
    query_lens: list[int],
    context_lens: list[int],
    scale: float,
) -> Tensor:
    """Causal attention of each request's newest tokens over all its cached tokens (the newest included).

    Args:
        query: `[T, H, D]`; request `b` owns `query_lens[b]` rows in a run, in the order of the lists.
        kv_cache: `[blocks, S, 2 * KV, D]`, already holding the keys and values of these rows.
        block_tables: one int64 tensor a request.
        query_lens: new tokens of each request; a decode has 1.
        context_lens: cached tokens of each request, the new ones included.
        scale: factor on the scores, `D ** -0.5` as a rule.

    Returns: `[T, H, D]` in the query's dtype; the softmax is taken in float32.
    """
    outputs = []
    start = 0
    for block_table, query_len, context_len in zip(block_tables, query_lens, context_lens, strict=True):
        rows = query[start : start + query_len].float()
        keys, values = gather_kv(kv_cache, block_table, context_len)
        group = rows.shape[1] // keys.shape[1]  # query heads that share one key/value head
        keys = keys.float().repeat_interleave(group, dim=1)
        values = values.float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", rows, keys) * scale
        # Row i is token context_len - query_len + i, and sees itself and what came before it.
        position = torch.arange(context_len - query_len, context_len, device=query.device)
        hidden = torch.arange(context_len, device=query.device)[None, :] > position[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype))
        start += query_len
    return torch.cat(outputs)
