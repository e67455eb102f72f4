"""The largest step of a replica on a CPU, as the runtime counts it when it starts. Pure.

    activations   of max_num_batched_tokens: the residual stream, the widest layer, the logits of the sampled rows
    attention     of the longest context: a copy of scattered keys and values, masks, scores of a soft cap; what each
                  thread of the compiled kernels keeps

A CPU that multiplies bfloat16 numbers holds keys and values of a bfloat16 model in 16 bits: contexts may be twice as
long, and nothing is copied but for trees of drafts. A plan does not know which CPU its pod meets: the larger counts.

The runtime's own count is `engine/execution/step_memory.py`, which needs torch. The constants are its constants:
tests/unit/contracts/test_cpu_step.py compares both over published models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream_operator.catalog.model_shape import ModelShape
from millstream_runtime.kv_formats import FLOAT32_BYTES, dequantizing_bytes

RESIDUAL_COPIES = 8
MLP_COPIES = 3
SAMPLED_COPIES, SCORED_COPIES = 6, 5  # of a row of logits: sampled, and of prompt log-probabilities
MOST_SCORED_ROWS, MOST_STEP_DRAFTS = 64, 64
EAGLE_INPUT_COPIES = 4
GATHER_LIMIT_BYTES, MASK_LIMIT_BYTES, SCORES_LIMIT_BYTES = 64 << 20, 32 << 20, 64 << 20
MOST_MERGED_QUERIES = 32
MOST_BLOCK_TOKENS = 128
# Of a thread of the kernel of prompts: panels of queries and results, and a tile of keys and values where it is copied.
PROMPT_SCRATCH_BYTES, PROMPT_ELEMENT_BYTES = 6464, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What bounds the steps of one replica.

    Attributes:
        threads: that the runtime starts at most.
        draft_tokens: proposed at a time; 0 without speculation.
        kv_cache: the format of keys and values.
        is_kv_narrow: whether those that are not quantized are held in 16 bits.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    threads: int
    draft_tokens: int = 0
    kv_cache: str = "None"
    is_kv_narrow: bool = False

    @property
    def sampled_rows(self) -> int:
        """Rows of logits that a step has at most: one per request, and one per draft."""
        return self.max_num_seqs + min(MOST_STEP_DRAFTS, self.draft_tokens * self.max_num_seqs)


def step_bytes(shape: ModelShape, limits: StepLimits, longest_tokens: int) -> int:
    """Return the bytes of the largest step, where memory is for contexts of up to `longest_tokens`."""
    longest_tokens = min(limits.max_model_len, max(1, longest_tokens))
    attention = _attention_bytes(shape, limits, limits.sampled_rows, longest_tokens)
    return _activations_bytes(shape, limits, limits.sampled_rows, shape.vocab_size) + attention


def draft_step_bytes(draft: ModelShape, limits: StepLimits) -> int:
    """Return the bytes of the largest pass of a draft model or head, which comes before a step.

    Medusa heads have no layers: their logits take less than those of the step.
    """
    head = draft.draft_head
    if head is not None and not head.has_keys:
        return 0
    longest_tokens = min(draft.longest_context_tokens, limits.max_model_len)
    vocab_size = draft.vocab_size if head is None else head.vocab_size
    of_layers = _activations_bytes(draft, limits, limits.max_num_seqs, vocab_size)
    of_layers += _attention_bytes(draft, limits, limits.max_num_seqs, longest_tokens)
    if head is None:
        return of_layers
    elements = (EAGLE_INPUT_COPIES + head.states) * draft.hidden_size
    return of_layers + elements * limits.max_num_batched_tokens * FLOAT32_BYTES


def _kv_shape(shape: ModelShape) -> tuple[int, int]:
    """What is kept of a token in one layer: rows, and elements of each. A latent (MLA) is one row of all heads."""
    if shape.latent_kv_elements is not None:
        return 1, shape.latent_kv_elements
    return 2 * shape.num_kv_heads, shape.head_size


def _activations_bytes(shape: ModelShape, limits: StepLimits, num_rows: int, vocab_size: int) -> int:
    """Without attention. Experts are computed one after another, so the widest takes what a dense layer would."""
    num_tokens, (rows, elements) = limits.max_num_batched_tokens, _kv_shape(shape)
    attention = 3 * shape.num_heads * max(shape.head_size, elements) + 2 * rows * elements
    width = max(*shape.intermediate_sizes, shape.named_intermediate_size)
    per_token = RESIDUAL_COPIES * shape.hidden_size + max(attention, MLP_COPIES * width)
    sampled, scored = min(num_rows, num_tokens), min(MOST_SCORED_ROWS, num_tokens)
    logits = max(SAMPLED_COPIES * sampled, SCORED_COPIES * scored) * vocab_size
    return (num_tokens * per_token + logits) * FLOAT32_BYTES


def _attention_bytes(shape: ModelShape, limits: StepLimits, num_rows: int, longest_tokens: int) -> int:
    """Windows count as if they were shorter than each context: Gemma 2 caps its scores in any case."""
    rows, elements = _kv_shape(shape)
    token_bytes = rows * elements * FLOAT32_BYTES
    copy_bytes = longest_tokens * token_bytes
    gathered_bytes = max(copy_bytes, min(GATHER_LIMIT_BYTES, num_rows * copy_bytes))
    more_bytes = dequantizing_bytes(limits.kv_cache, rows, elements, FLOAT32_BYTES)
    more_bytes += limits.is_kv_narrow * token_bytes // 2
    gathered_bytes += gathered_bytes * more_bytes // token_bytes
    if limits.is_kv_narrow and not limits.draft_tokens:
        gathered_bytes = 0
    group = shape.num_heads if rows == 1 else -(-2 * shape.num_heads // rows)
    mask_bytes = min(MASK_LIMIT_BYTES, group * MOST_MERGED_QUERIES * longest_tokens * FLOAT32_BYTES)
    kept_bytes = min(MASK_LIMIT_BYTES, num_rows * mask_bytes)
    is_plain = rows > 1 and not shape.windows
    masks_bytes = max(mask_bytes + kept_bytes, 0 if is_plain else SCORES_LIMIT_BYTES)
    kernels_bytes = _decode_bytes(group, elements, longest_tokens, shape.windows) + _prompt_bytes(elements, limits)
    return gathered_bytes + masks_bytes + limits.threads * kernels_bytes


def _decode_bytes(group: int, elements: int, longest_tokens: int, windows: Sequence[int | None]) -> int:
    """What a thread of the kernel of decodes keeps: enough for the layer that sees most."""
    most = max(longest_tokens if window is None else min(window, longest_tokens) for window in windows or (None,))
    return (group * (most + 2 * elements) + MOST_BLOCK_TOKENS * elements) * FLOAT32_BYTES


def _prompt_bytes(elements: int, limits: StepLimits) -> int:
    """What a thread of the kernel of prompts keeps."""
    copies = 1 if limits.kv_cache == "None" and not limits.is_kv_narrow else 2
    return PROMPT_SCRATCH_BYTES + copies * PROMPT_ELEMENT_BYTES * elements
