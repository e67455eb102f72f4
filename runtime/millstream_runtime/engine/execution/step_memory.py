"""The memory of the largest step, by arithmetic: for a CPU, where computing that step would take minutes.

    activations   of max_num_batched_tokens: the residual stream, the widest layer, the logits of the sampled rows
    attention     of the longest context: the copy of scattered blocks, masks that are kept, scores of a soft cap; what
                  the threads of the compiled kernels keep

A GPU measures the same step (`shard.measure_memory`).
"""

from __future__ import annotations

import torch

from millstream_kernels.cpu.task import decode_scratch_numbers, prompt_scratch_bytes
from millstream_runtime.engine.attention.prefill import MASK_LIMIT_BYTES, MOST_MERGED_QUERIES
from millstream_runtime.engine.attention.scaled_dot_product import SCORES_LIMIT_BYTES
from millstream_runtime.engine.attention.side_by_side import GATHER_LIMIT_BYTES
from millstream_runtime.engine.sampling.logprobs import PROMPT_SLAB_ROWS
from millstream_runtime.kv_formats import FLOAT32_BYTES, dequantizing_bytes
from millstream_runtime.models.config.model_config import ModelConfig

RESIDUAL_COPIES = 8  # the residual, its normed copy, what norms and rotations take, rows in and out of experts
MLP_COPIES = 3  # gate and up as one product, and the activation
# Of the logits in float32, at most. A sampled row: the model's own, its log-probabilities, weights, and copies of these
# while they are made. Sums in float64 are of a few rows at a time. A row of prompt log-probabilities: these, and which
# are higher.
SAMPLED_COPIES = 6
SCORED_COPIES = 5
MOST_BLOCK_TOKENS = 128


def activations_bytes(config: ModelConfig, dtype_bytes: int, *, num_tokens: int, num_rows: int) -> int:
    """Return what a step of `num_tokens` takes beside its attention; `num_rows` of them are sampled.

    `config`: of this rank. Experts are computed one after another, so the largest takes what a dense layer would.
    """
    rows, elements = config.kv_shape
    query_size = config.num_heads * max(config.head_dim, elements)
    attention = 3 * query_size + 2 * rows * elements  # query, result and one copy of them; keys and values
    if dtype_bytes < FLOAT32_BYTES:  # query and result in float32, as the compiled kernels take and make them
        attention += 2 * query_size * FLOAT32_BYTES // dtype_bytes
    elements_per_token = RESIDUAL_COPIES * config.hidden_size + max(attention, MLP_COPIES * config.intermediate_size)
    copied_rows = max(SAMPLED_COPIES * min(num_rows, num_tokens), SCORED_COPIES * min(PROMPT_SLAB_ROWS, num_tokens))
    logits_bytes = copied_rows * config.vocab_size * FLOAT32_BYTES
    return num_tokens * elements_per_token * dtype_bytes + logits_bytes


def attention_bytes(
    config: ModelConfig,
    dtype_bytes: int,
    *,
    longest_tokens: int,
    num_rows: int,
    kv_method: str = "None",
    is_kv_widened: bool = False,
    has_trees: bool = False,
) -> int:
    """Return what attention takes at most, where a request has `longest_tokens`.

    Args:
        kv_method: of the KV cache.
        is_kv_widened: whether it holds numbers of 16 bits for a model of 32. Then the compiled kernels are there, which
            read it in place, all but trees of drafts.
        has_trees: whether steps check trees of drafts.
    """
    rows, elements = config.kv_shape
    token_bytes = rows * elements * dtype_bytes
    longest_copy_bytes = longest_tokens * token_bytes
    gathered_bytes = max(longest_copy_bytes, min(GATHER_LIMIT_BYTES, num_rows * longest_copy_bytes))
    more_bytes = dequantizing_bytes(kv_method, rows, elements, dtype_bytes) + is_kv_widened * token_bytes // 2
    gathered_bytes += gathered_bytes * more_bytes // token_bytes
    if is_kv_widened and not has_trees:
        gathered_bytes = 0
    group = config.num_heads if rows == 1 else -(-config.num_heads * 2 // rows)
    mask_bytes = min(MASK_LIMIT_BYTES, group * MOST_MERGED_QUERIES * longest_tokens * dtype_bytes)
    kept_bytes = min(MASK_LIMIT_BYTES, num_rows * mask_bytes)
    scores_bytes = 0 if config.has_plain_attention else SCORES_LIMIT_BYTES
    compiled_bytes = prompt_bytes(config, dtype_bytes, kv_method, is_kv_widened=is_kv_widened) + decode_bytes(
        config, longest_tokens
    )
    return gathered_bytes + max(mask_bytes + kept_bytes, scores_bytes) + compiled_bytes


def decode_bytes(config: ModelConfig, longest_tokens: int) -> int:
    """Return what all threads of the compiled kernel of decodes keep, in the layer that reads furthest back: scores of
    the heads that share a key. With a latent key (MLA) those are all heads."""
    rows, elements = config.kv_shape
    group = config.num_heads if rows == 1 else -(-config.num_heads * 2 // rows)
    seen = [longest_tokens if window is None else min(window, longest_tokens) for window in config.windows or (None,)]
    numbers = decode_scratch_numbers(group, max(seen), elements, MOST_BLOCK_TOKENS)
    return torch.get_num_threads() * numbers * FLOAT32_BYTES


def prompt_bytes(config: ModelConfig, dtype_bytes: int, kv_method: str = "None", *, is_kv_widened: bool = False) -> int:
    """Return what all threads of the compiled kernel of prompts keep, whatever they attend to."""
    _, elements = config.kv_shape
    is_copied = dtype_bytes != FLOAT32_BYTES or kv_method != "None" or is_kv_widened
    return torch.get_num_threads() * prompt_scratch_bytes(elements, elements, is_copied=is_copied)


def worst_step_bytes(
    config: ModelConfig,
    dtype_bytes: int,
    *,
    num_tokens: int,
    num_rows: int,
    longest_tokens: int,
    kv_method: str = "None",
    is_kv_widened: bool = False,
    has_trees: bool = False,
) -> int:
    """Return the memory of a step of `num_tokens` whose requests have up to `longest_tokens`."""
    activations = activations_bytes(config, dtype_bytes, num_tokens=num_tokens, num_rows=num_rows)
    attention = attention_bytes(
        config,
        dtype_bytes,
        longest_tokens=longest_tokens,
        num_rows=num_rows,
        kv_method=kv_method,
        is_kv_widened=is_kv_widened,
        has_trees=has_trees,
    )
    return activations + attention
