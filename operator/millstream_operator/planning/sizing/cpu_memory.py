"""The memory of a replica on a CPU: what the runtime will find in its container.

The shares are the runtime's own (`engine/kv/pool_size.py`): weights in 16 or 32 bits (`cpu_dtype.py`) or packed, the
process, the largest step (`cpu_step.py`), a margin, and at most 30 % of the container's memory for the KV pool, in
float32 or in the format that the spec names. A draft model's weights, keys and values are counted as the model's are,
and so are a draft head's, with the hidden states that it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from millstream_operator.api.spec import LLMDeploymentSpec
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.planning.sizing.cpu_container import MOST_BYTES, memory_limit_bytes, most_threads
from millstream_operator.planning.sizing.cpu_step import StepLimits, draft_step_bytes, step_bytes
from millstream_operator.planning.sizing.kv_pool import KvPool, kv_pool
from millstream_operator.planning.sizing.memory_ledger import MemoryLedger, draft_token_bytes, kv_bytes_per_token
from millstream_operator.planning.sizing.weights import inputs_per_output, linear_bytes, weight_format

POOL_SHARE_PERCENT = 30
MARGIN_PERCENT = 5  # of the limit: beyond it the kernel kills
LEAST_STEP_BYTES = 256 << 20  # as earlier releases reserved for every model
PROCESS_BYTES = 640 << 20  # Python, torch and the server, before any weight
BFLOAT16_CODE_BYTES = 32 << 20  # what oneDNN writes when its product of bfloat16 numbers is checked, and keeps
FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2
KEPT_PERCENT = 90  # of the planned tokens, which the pool of a pod must hold
USUAL_LENGTH = 128  # tokens; the runtime takes what the model and the pool allow
MOST_LIMITS = 64  # that are tried until one is enough


@dataclass(frozen=True, slots=True)
class CpuMemory:
    """`kv_cache_bytes` of the ledger is negative where not even the weights fit.

    `largest_step`: its bytes in a container with so many bytes of memory, which bound the longest context.
    """

    ledger: MemoryLedger
    pool: KvPool
    largest_step: Callable[[int], int]

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.pool.tokens(self.ledger.kv_cache_bytes)

    def holds(self, tokens: int) -> bool:
        """Whether the pool holds a request of so many tokens."""
        return self.ledger.kv_cache_bytes >= self.pool.bytes_for([(1, tokens)])

    def limit_for(self, tokens: int) -> int:
        """Return the bytes of a memory limit with which the pool holds a request of so many tokens.

        More memory holds longer contexts, whose steps are larger. So limits are tried from below, up to one that holds
        its own step; where none does soon, it is the one for the longest context of the model.
        """
        need, ledger = self.pool.bytes_for([(1, tokens)]), self.ledger
        weights = ledger.weights_bytes + ledger.embeddings_bytes + ledger.draft_weights_bytes
        others = ledger.context_bytes + weights + need
        least = limit = max(ledger.usable_bytes, -(-need * 100 // POOL_SHARE_PERCENT))
        for _ in range(MOST_LIMITS):
            enough = _with_margin(others + self.largest_step(limit))
            if enough <= limit:
                return limit
            limit = enough
        return max(least, _with_margin(others + self.largest_step(MOST_BYTES)))


def _with_margin(num_bytes: int) -> int:
    return -(-num_bytes * 100 // (100 - MARGIN_PERCENT))


def shortest_length(spec: LLMDeploymentSpec, shape: ModelShape) -> int:
    """The tokens that the pool must hold: one request of full length, or a short one where the spec names no length."""
    return (spec.engine.max_model_len if spec.engine else None) or min(shape.max_position_embeddings, USUAL_LENGTH)


def planned_length(spec: LLMDeploymentSpec, shape: ModelShape, memory: CpuMemory) -> int | None:
    """Return the tokens of one request without whose room a pod is to end its boot; a tenth is left for what differs.

    None where the spec names a length, of which the runtime refuses less room in any case; of an image that the spec
    names: its runtime may not know the field; and of float32 weights, whose plans are those of earlier releases.
    """
    if shape.compute_bytes == FLOAT32_BYTES:
        return None
    if (spec.runtime is not None and spec.runtime.image) or (spec.engine is not None and spec.engine.max_model_len):
        return None
    return max(1, min(shape.max_position_embeddings, memory.kv_cache_tokens) * KEPT_PERCENT // 100)


def process_bytes(shape: ModelShape) -> int:
    """What the processes of a replica take before any weight."""
    return PROCESS_BYTES + (BFLOAT16_CODE_BYTES if shape.dtype == "BF16" else 0)


def cpu_weights_bytes(shape: ModelShape) -> int:
    """What the weights take at least: `shape.compute_bytes` each, but quantized linear layers as they are stored.

    Norms, routers and MLA's `kv_b_proj` are held in float32, whatever the others are held in.
    """
    parameters = shape.parameters
    wide = parameters.norms + parameters.routers + shape.latent_up_parameters
    total_bytes = (parameters.total - wide) * shape.compute_bytes + wide * FLOAT32_BYTES
    if shape.quantization is None:
        return total_bytes
    quantized = parameters.linear - shape.unquantized_parameters - shape.dequantized_parameters
    stored = replace(weight_format(shape, shape.quantization.method), inputs_per_output=inputs_per_output(shape))
    return total_bytes - quantized * shape.compute_bytes + linear_bytes(quantized, stored)


def cpu_memory(
    spec: LLMDeploymentSpec,
    shape: ModelShape,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    is_grouped: bool | None,
    kv_cache: str = "None",
    draft: ModelShape | None = None,
    draft_tokens: int = 0,
) -> CpuMemory:
    """The ledger and the KV pool of one replica on a CPU.

    Args:
        is_grouped: see `kv_layout.choose_layout`.
        kv_cache: the format of keys and values.
        draft: the draft model or head. Its pool has as many blocks as the model's, in the same format.
        draft_tokens: proposed at a time; 0 without speculation.
    """
    limit = memory_limit_bytes(spec)
    tables = (shape.parameters.embedding + shape.parameters.head) * shape.compute_bytes
    weights = cpu_weights_bytes(shape) - tables
    draft_weights = cpu_weights_bytes(draft) if draft is not None else 0
    max_model_len = (spec.engine.max_model_len if spec.engine else None) or shape.max_position_embeddings
    limits = StepLimits(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        threads=most_threads(spec),
        draft_tokens=draft_tokens,
        kv_cache=kv_cache,
    )
    largest_step = _largest_step(shape, draft, limits, weights + tables + draft_weights)
    step = largest_step(limit)
    process = process_bytes(shape)
    rest = limit - process - step - weights - tables - draft_weights
    pool = min(rest - limit * MARGIN_PERCENT // 100, limit * POOL_SHARE_PERCENT // 100)
    ledger = MemoryLedger(
        usable_bytes=limit,
        headroom_bytes=rest - pool,
        context_bytes=process,
        graphs_bytes=0,
        nccl_bytes=0,
        weights_bytes=weights,
        embeddings_bytes=tables,
        draft_weights_bytes=draft_weights,
        activations_bytes=step,
        kv_cache_bytes=pool,
    )
    return CpuMemory(
        ledger,
        kv_pool(
            shape,
            kv_bytes_per_token(shape, kv_cache, dtype_bytes=FLOAT32_BYTES),
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            is_grouped=is_grouped,
            draft_token_bytes=0 if draft is None else draft_token_bytes(draft, kv_cache, dtype_bytes=FLOAT32_BYTES),
        ),
        largest_step,
    )


def _largest_step(
    shape: ModelShape, draft: ModelShape | None, limits: StepLimits, weights_bytes: int
) -> Callable[[int], int]:
    """Return what gives the bytes of the largest step for a memory limit.

    The runtime counts a context that fills all memory next to the weights, or one of `max_model_len`.
    """
    of_draft = 0
    if draft is not None:
        of_draft = max(draft_step_bytes(draft, held) for held, _ in _held_on_cpus(draft, limits))

    def largest_step(limit_bytes: int) -> int:
        of_model = 0
        for held, number_bytes in _held_on_cpus(shape, limits):
            token_bytes = kv_bytes_per_token(shape, limits.kv_cache, dtype_bytes=number_bytes)
            of_model = max(of_model, step_bytes(shape, held, (limit_bytes - weights_bytes) // token_bytes))
        return max(LEAST_STEP_BYTES, of_model, of_draft)

    return largest_step


def _held_on_cpus(shape: ModelShape, limits: StepLimits) -> list[tuple[StepLimits, int]]:
    """How keys and values may be held, by the CPU that the pod meets, and the bytes of a number then."""
    kinds = [(limits, FLOAT32_BYTES)]
    if shape.dtype == "BF16":
        kinds.append((replace(limits, is_kv_narrow=True), BFLOAT16_BYTES))
    return kinds
