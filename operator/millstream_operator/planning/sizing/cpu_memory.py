"""The memory of a replica on a CPU: what the runtime will find in its container.

The shares are the runtime's own (`engine/kv/pool_size.py`): float32 or packed weights, a reserve, and at most 30 % of
the container's memory for the KV pool, in float32 or in the format that the spec names. A draft model's weights, keys
and values are counted as the model's are, and so are a draft head's, with the hidden states that it reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from millstream_operator.api.pod_template import ResourceRequirements
from millstream_operator.api.quantity import amount
from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.sizing.kv_pool import KvPool, kv_pool
from millstream_operator.planning.sizing.memory_ledger import MemoryLedger, draft_token_bytes, kv_bytes_per_token
from millstream_operator.planning.sizing.weights import inputs_per_output, linear_bytes, weight_format

CPU_MEMORY_LIMIT = "4Gi"
POOL_SHARE_PERCENT = 30
RESERVE_BYTES = 256 << 20
PROCESS_BYTES = 640 << 20  # Python, torch and the server, before any weight
FLOAT32_BYTES = 4
USUAL_LENGTH = 128  # tokens; the runtime takes what the model and the pool allow
MOST_BYTES = 2**63 - 1  # the largest number of a status


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """`kv_cache_bytes` of the ledger is negative where not even the weights fit."""

    ledger: MemoryLedger
    pool: KvPool

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.pool.tokens(self.ledger.kv_cache_bytes)

    def holds(self, tokens: int) -> bool:
        """Whether the pool holds a request of so many tokens."""
        return self.ledger.kv_cache_bytes >= self.pool.bytes_for([(1, tokens)])

    def limit_for(self, tokens: int) -> int:
        """Return the bytes of a memory limit with which the pool holds a request of so many tokens."""
        need, ledger = self.pool.bytes_for([(1, tokens)]), self.ledger
        weights = ledger.weights_bytes + ledger.embeddings_bytes + ledger.draft_weights_bytes
        rest = ledger.context_bytes + ledger.activations_bytes + weights
        return max(rest + need, -(-need * 100 // POOL_SHARE_PERCENT))


def shortest_length(spec: LLMDeploymentSpec, shape: ModelShape) -> int:
    """The tokens that the pool must hold: one request of full length, or a short one where the spec names no length."""
    return (spec.engine.max_model_len if spec.engine else None) or min(shape.max_position_embeddings, USUAL_LENGTH)


def memory_limit_bytes(spec: LLMDeploymentSpec) -> int:
    """The memory limit that the runtime container gets: podTemplate's limit, else the planner's or, where it is more,
    podTemplate's request (as `rendering/container_resources.py` merges them)."""
    template = spec.pod_template.spec if spec.pod_template else None
    container = next(iter((template.containers if template else None) or []), None)
    given = (container.resources if container else None) or ResourceRequirements()
    if given.limits is not None and given.limits.memory is not None:
        return _bytes(given.limits.memory)
    request = (given.requests.memory if given.requests is not None else None) or "0"
    return max(_bytes(CPU_MEMORY_LIMIT), _bytes(request))


def _bytes(quantity: str) -> int:
    return min(math.floor(amount(quantity)), MOST_BYTES)


def cpu_weights_bytes(shape: ModelShape) -> int:
    """What the weights take at least: float32, but quantized linear layers as the checkpoint stores them."""
    total_bytes = shape.parameters.total * FLOAT32_BYTES
    if shape.quantization is None:
        return total_bytes
    quantized = shape.parameters.linear - shape.unquantized_parameters - shape.dequantized_parameters
    stored = replace(weight_format(shape, shape.quantization.method), inputs_per_output=inputs_per_output(shape))
    return total_bytes - quantized * FLOAT32_BYTES + linear_bytes(quantized, stored)


def cpu_memory(
    spec: LLMDeploymentSpec,
    shape: ModelShape,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    is_grouped: bool | None,
    kv_cache: str = "None",
    draft: ModelShape | None = None,
) -> CpuMemory:
    """The ledger and the KV pool of one replica on a CPU.

    Args:
        is_grouped: see `kv_layout.choose_layout`.
        kv_cache: the format of keys and values.
        draft: the draft model or head. Its pool has as many blocks as the model's, in the same format.
    """
    limit = memory_limit_bytes(spec)
    tables = (shape.parameters.embedding + shape.parameters.head) * FLOAT32_BYTES
    weights = cpu_weights_bytes(shape) - tables
    draft_weights = cpu_weights_bytes(draft) if draft is not None else 0
    rest = limit - PROCESS_BYTES - RESERVE_BYTES - weights - tables - draft_weights
    pool = min(rest, limit * POOL_SHARE_PERCENT // 100)
    ledger = MemoryLedger(
        usable_bytes=limit,
        headroom_bytes=rest - pool,
        context_bytes=PROCESS_BYTES,
        graphs_bytes=0,
        nccl_bytes=0,
        weights_bytes=weights,
        embeddings_bytes=tables,
        draft_weights_bytes=draft_weights,
        activations_bytes=RESERVE_BYTES,
        kv_cache_bytes=pool,
    )
    return CpuMemory(
        ledger,
        kv_pool(
            shape,
            kv_bytes_per_token(shape, kv_cache, dtype_bytes=FLOAT32_BYTES),
            max_model_len=(spec.engine.max_model_len if spec.engine else None) or shape.max_position_embeddings,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            is_grouped=is_grouped,
            draft_token_bytes=0 if draft is None else draft_token_bytes(draft, kv_cache, dtype_bytes=FLOAT32_BYTES),
        ),
    )
