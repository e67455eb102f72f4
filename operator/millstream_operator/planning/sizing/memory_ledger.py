"""The memory ledger of one GPU: every byte has a name, and the names add up to what the GPU has.

    usable = headroom + context + graphs + nccl + weights + embeddings + draft + activations + kv cache

`headroom` is what gpuMemoryUtilizationPercent leaves alone; the KV cache takes all that the others leave. The formulas
are in docs/planning.md. They err on the full side: an estimate that is too small crash-loops (KAITO 2132: 2.3 GiB of
overhead planned, 5.5 used).
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream_operator.catalog.gpu import GpuPart
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.calibration import NO_CORRECTION, Correction
from millstream_operator.planning.sizing.weights import RankWeights, WeightFormat
from millstream_runtime.kv_formats import dequantizing_bytes, kv_token_bytes

CONTEXT_BYTES = 512 << 20  # CUDA context, cuBLAS handles and their workspaces
GRAPHS_BYTES_PER_LAYER = 8 << 20  # captured decode batches of one layer, all sizes in one pool
NCCL_BYTES, NCCL_BYTES_PER_RANK = 256 << 20, 32 << 20
LOGIT_BYTES = 4
WEIGHT_ONLY = ("AWQ", "GPTQ", "RTN", "NF4", "GGUF")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """Bytes of one GPU. A negative `kv_cache_bytes` is what is missing."""

    usable_bytes: int
    headroom_bytes: int
    context_bytes: int
    graphs_bytes: int
    nccl_bytes: int
    weights_bytes: int
    embeddings_bytes: int
    draft_weights_bytes: int
    activations_bytes: int
    kv_cache_bytes: int

    def as_dict(self) -> dict[str, int]:
        """In the API's words, in the order in which a reader wants them."""
        return {
            "usableBytes": self.usable_bytes,
            "weightsBytes": self.weights_bytes,
            "embeddingsBytes": self.embeddings_bytes,
            "draftWeightsBytes": self.draft_weights_bytes,
            "activationsBytes": self.activations_bytes,
            "graphsBytes": self.graphs_bytes,
            "ncclBytes": self.nccl_bytes,
            "contextBytes": self.context_bytes,
            "kvCacheBytes": self.kv_cache_bytes,
            "headroomBytes": self.headroom_bytes,
        }


def gpu_ledger(
    part: GpuPart,
    utilization_percent: int,
    shape: ModelShape,
    weights: RankWeights,
    activations_bytes: int,
    *,
    ranks: int,
    draft: RankWeights | None = None,
    correction: Correction = NO_CORRECTION,
) -> MemoryLedger:
    """Fill the ledger of the fullest rank; what is left over is the KV cache's. `correction`: what was measured."""
    usable = part.usable_memory_bytes
    predicted = {
        "headroom_bytes": usable * (100 - utilization_percent) // 100,
        "context_bytes": CONTEXT_BYTES,
        "graphs_bytes": GRAPHS_BYTES_PER_LAYER * shape.num_layers,
        "nccl_bytes": NCCL_BYTES + NCCL_BYTES_PER_RANK * ranks if ranks > 1 else 0,
        "weights_bytes": weights.linear_bytes,
        "embeddings_bytes": weights.embeddings_bytes,
        "draft_weights_bytes": draft.total_bytes if draft else 0,
        "activations_bytes": activations_bytes,
    }
    taken = {name: correction.corrected(name, num_bytes) for name, num_bytes in predicted.items()}
    return MemoryLedger(usable_bytes=usable, kv_cache_bytes=usable - sum(taken.values()), **taken)


def activations_bytes(
    shape: ModelShape,
    stored: WeightFormat,
    *,
    tensor: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    draft_tokens: int = 0,
    kv_cache: str = "None",
    max_model_len: int = 0,
) -> int:
    """Peak of one step of `max_num_batched_tokens`: the residual, the widest layer, the logits, one dequantised matrix,
    and what a layer dequantises of a context of `max_model_len` where the KV cache has 8 bits.

    The stream and its normed copy are whole on every rank; heads and MLP columns are cut. Only rows that are sampled
    (and checked drafts) reach the head, and their logits are gathered in fp32.
    """
    tokens, hidden = max_num_batched_tokens, shape.hidden_size
    heads = shape.num_heads // tensor + 2 * shape.kv_heads_per_rank(tensor) + shape.num_heads // tensor
    attention = tokens * heads * shape.head_size
    width = max(shape.intermediate_sizes)
    mlp = tokens * 3 * -(-width // tensor)
    if shape.num_experts:  # each token visits several experts: its stream and its columns once for each
        copies = tokens * shape.num_experts_per_token
        mlp = max(mlp, copies * (3 * -(-min(shape.intermediate_sizes) // tensor) + hidden))
    rows = min(max_num_seqs, tokens) * (1 + draft_tokens)
    logits = rows * shape.padded_vocab_size * LOGIT_BYTES
    unpacked = 2 * hidden * -(-width // tensor) * shape.compute_bytes if stored.method in WEIGHT_ONLY else 0
    copied = max_model_len * _dequantized_token_bytes(shape, kv_cache, tensor)
    return (2 * tokens * hidden + max(attention, mlp)) * shape.compute_bytes + logits + unpacked + copied


def _dequantized_token_bytes(shape: ModelShape, kv_cache: str, tensor: int) -> int:
    """What torch takes in a layer for a token whose keys and values it dequantises. Those of 16 bits it may copy, too:
    that is within what the other parts are estimated too high."""
    if kv_cache == "None":
        return 0
    elements = shape.kv_elements_per_token(tensor, 1)
    heads = 1 if shape.latent_kv_elements is not None else elements // shape.head_size
    more_bytes = dequantizing_bytes(kv_cache, heads, elements // heads, shape.compute_bytes)
    return elements * shape.compute_bytes + more_bytes


def kv_bytes_per_token(
    shape: ModelShape,
    kv_cache: str,
    tensor: int = 1,
    num_layers: int | None = None,
    *,
    dtype_bytes: int | None = None,
) -> int:
    """Bytes that one rank keeps for one token. INT8 keeps a 16-bit scale for each head of each token.

    `dtype_bytes`: of a number that is not quantized; by default those of the model's dtype.
    """
    elements = shape.kv_elements_per_token(tensor, num_layers)
    if shape.latent_kv_elements is not None:  # one head in each layer
        heads = shape.num_layers if num_layers is None else num_layers
    else:
        heads = elements // shape.head_size
    return kv_token_bytes(kv_cache, heads, elements // heads, dtype_bytes or shape.compute_bytes)


def draft_token_bytes(draft: ModelShape, kv_cache: str, tensor: int = 1, *, dtype_bytes: int | None = None) -> int:
    """Bytes that one rank keeps of one token for the draft: its keys and values, and for a head the target's hidden
    states, which are not quantized. `dtype_bytes`: as in `kv_bytes_per_token`."""
    head = draft.draft_head
    keys_bytes = kv_bytes_per_token(draft, kv_cache, tensor, dtype_bytes=dtype_bytes)
    if head is None:
        return keys_bytes
    states_bytes = head.states * head.target_hidden_size * (dtype_bytes or draft.compute_bytes)
    return states_bytes + (keys_bytes if head.has_keys else 0)
