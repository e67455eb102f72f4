"""One call of attention: scores, mask, soft cap, softmax and the weighted sum of values.

A soft cap has no fused kernel: its scores are tensors, so callers cut their queries by `queries_within`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.models.layers.attention import AttentionSpec

# What the scores of one call with a soft cap may take, unless those of a single query take more.
SCORES_LIMIT_BYTES = 64 << 20


def keys_values(heads: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Keys and values of pool heads: `[.., 2 * KV, tokens, D]`, or 1 for MLA.

    A latent row is the key and, but for its last elements, the value too. It is used whole as both: the kernels want
    equal sizes, and the caller drops the rest.
    """
    if spec.latent_dim:
        return heads, heads
    keys, values = heads.chunk(2, dim=-3)
    return keys, values


def score_bytes(dtype: torch.dtype) -> int:
    """What one score with a soft cap takes at most: itself, its weight in float32, and the weight in `dtype`."""
    return 2 * dtype.itemsize + max(dtype.itemsize, 4)


def queries_within(scores_per_query: int, dtype: torch.dtype) -> int:
    """How many queries with that many scores each stay within SCORES_LIMIT_BYTES; at least one."""
    return max(1, SCORES_LIMIT_BYTES // (scores_per_query * score_bytes(dtype)))


def attend_decodes(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """`attend` for one new token a row, `query` `[rows, KV, group, D]`. On a CPU it calls the kernel that torch would
    choose: choosing is a fifth of the call at batch 1."""
    if spec.softcap is None and query.device.type == "cpu":
        attended, _ = torch._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, attn_mask=mask, scale=spec.scale
        )
        return attended
    if spec.softcap is None:
        return attend(query, keys, values, mask, spec)
    most = queries_within(query.shape[1] * query.shape[2] * keys.shape[2], query.dtype)
    pieces = []
    for first in range(0, query.shape[0], most):
        rows = slice(first, first + most)
        pieces.append(attend(query[rows], keys[rows], values[rows], None if mask is None else mask[rows], spec))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """`query` `[.., group, D]` over `keys`, `values` `[.., tokens, D]`; `mask`: added to the scores."""
    if spec.softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=spec.scale)
    return torch.matmul(_capped_weights(torch.matmul(query, keys.mT), mask, spec), values)


def attend_capped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, spec: AttentionSpec) -> Tensor:
    """With a soft cap: `query` `[KV, group, n, D]` over `keys`, `values` `[KV, tokens, D]`, `mask` `[n, tokens]`.

    The heads of a group are rows of one product, so that keys and values are not repeated for it.
    """
    num_heads, group, num_queries, head_dim = query.shape
    scores = torch.matmul(query.reshape(num_heads, group * num_queries, head_dim), keys.mT)
    weights = _capped_weights(scores.view(num_heads, group, num_queries, -1), mask, spec)
    attended = torch.matmul(weights.view(num_heads, group * num_queries, -1), values)
    return attended.view(num_heads, group, num_queries, -1)


def _capped_weights(scores: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Softmax of the capped scores, which are overwritten."""
    if spec.softcap is None:
        raise ValueError("these scores have no soft cap")
    scores.mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap)
    if mask is not None:
        scores.add_(mask)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(dim=-1, dtype=wide).to(scores.dtype)
