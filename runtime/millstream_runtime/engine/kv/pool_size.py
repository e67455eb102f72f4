"""How large the KV pool is: bytes in, blocks out. Pure; the engine measures.

Weights and the largest step are counted first and the pool takes what is left, more than running requests need: the
rest is prefix cache. The budget of every refusal adds up.

Plans of earlier releases promised up to 30 % of a container's memory and did not count the largest step. A pod of such
a plan must start: where what is left does not hold one request and that promise does, the pool is what the request
needs.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.kv_layout import MOST_BLOCKS

# What the planner promises the pool on a CPU at most, of the memory limit; also its share of a machine that others use.
CPU_POOL_SHARE_PERCENT = 30
CPU_RESERVE_BYTES = 256 << 20  # code made for products, the HTTP process, what malloc keeps
CPU_MARGIN_PERCENT = 5  # of a container's limit: beyond it the kernel kills
LEAST_LENGTH_TOKENS = 128  # of a request that a plan promises to hold where it names no length


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """What the memory of one device is used for, in bytes. `available_bytes` is what the pool may take.

    `promised_bytes`: what plans of earlier releases promised; see above.
    """

    limit_bytes: int
    used_bytes: int  # weights and everything else that is there before the pool
    reserve_bytes: int  # activations, CUDA graphs and whatever must stay free
    available_bytes: int
    activations_bytes: int | None = None  # of the largest step: measured on CUDA, counted on a CPU
    promised_bytes: int = 0

    def pool_bytes(self, request_bytes: int) -> int:
        """What the pool takes, where the request that was planned takes `request_bytes`."""
        is_promised = request_bytes <= self.promised_bytes
        return max(self.available_bytes, request_bytes if is_promised else 0)

    def __str__(self) -> str:
        return (
            f"{gibibytes(self.limit_bytes)} usable - {gibibytes(self.used_bytes)} weights and process "
            f"- {gibibytes(self.reserve_bytes)} activations and reserve leaves {gibibytes(self.available_bytes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What was measured on one device (of several ranks, rank 0's), as `/ready` reports it. None: not measured."""

    weights_bytes: int  # allocated for parameters: embeddings and a CPU's second copies included
    activations_bytes: int | None  # of the largest step at the longest context; on a CPU counted, not measured
    graphs_bytes: int | None  # of the CUDA graphs, all of which are recorded at boot
    kv_cache_bytes: int  # of the pool's tensors; on a CPU a page takes memory once a request writes to it
    kv_cache_tokens: int
    draft_weights_bytes: int | None = None  # of a draft model, on rank 0
    draft_kv_cache_bytes: int | None = None  # of its pool, whose blocks are those of the target's

    def measured(self) -> dict[str, int]:
        """What was measured, by name."""
        return {name: num_bytes for name, num_bytes in asdict(self).items() if num_bytes is not None}


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The result: blocks of the pool and the longest request it can hold."""

    num_blocks: int
    max_model_len: int


def cpu_budget(
    limit_bytes: int, used_bytes: int, activations_bytes: int = 0, *, is_container: bool = False
) -> MemoryBudget:
    """What is left of a container's memory after weights, the largest step and a margin.

    A machine's memory belongs to other processes too, so there it is a share.

    Args:
        used_bytes: by this process, weights included.
        activations_bytes: of the largest step (`step_memory`).
    """
    reserve_bytes = CPU_RESERVE_BYTES
    share_bytes = max(0, min(limit_bytes - used_bytes - reserve_bytes, limit_bytes * CPU_POOL_SHARE_PERCENT // 100))
    available_bytes, promised_bytes = share_bytes, 0
    if is_container:
        reserve_bytes += step_reserve_bytes(limit_bytes, activations_bytes)
        available_bytes, promised_bytes = max(0, limit_bytes - used_bytes - reserve_bytes), share_bytes
    return MemoryBudget(
        limit_bytes=limit_bytes,
        used_bytes=used_bytes,
        reserve_bytes=reserve_bytes,
        available_bytes=available_bytes,
        activations_bytes=activations_bytes,
        promised_bytes=promised_bytes,
    )


def step_reserve_bytes(limit_bytes: int, activations_bytes: int) -> int:
    """Return what a container keeps free for its steps: the largest, and a margin."""
    return activations_bytes + limit_bytes * CPU_MARGIN_PERCENT // 100


def copy_budget_bytes(limit_bytes: int, used_bytes: int, weight_bytes: int, step_bytes: int = 0) -> int:
    """Return what second copies of weights may take on a CPU: half of the memory that nothing else claims.

    The pool comes first: the planner has promised its share before a byte was read, and knows of no copies.

    Args:
        used_bytes: by the process before any weight is there.
        step_bytes: what a container keeps free for its steps.
    """
    pool_bytes = limit_bytes * CPU_POOL_SHARE_PERCENT // 100
    claimed_bytes = used_bytes + weight_bytes + pool_bytes + CPU_RESERVE_BYTES + step_bytes
    return max(0, limit_bytes - claimed_bytes) // 2


def cuda_budget(limit_bytes: int, used_bytes: int, activations_bytes: int, graphs_bytes: int) -> MemoryBudget:
    """The pool takes what weights, the largest step's activations and the graphs to come leave."""
    reserve_bytes = activations_bytes + graphs_bytes
    return MemoryBudget(
        limit_bytes=limit_bytes,
        used_bytes=used_bytes,
        reserve_bytes=reserve_bytes,
        available_bytes=max(0, limit_bytes - used_bytes - reserve_bytes),
        activations_bytes=activations_bytes,
    )


def size_pool(
    budget: MemoryBudget,
    *,
    asked_bytes: int | None,
    block_bytes: int,
    block_size_tokens: int,
    max_model_len: int,
    max_model_len_is_explicit: bool,
    max_num_seqs: int,
    blocks_for: Callable[[int], int] | None = None,
    planned_model_len: int | None = None,
) -> PoolSize:
    """Blocks of the pool: `asked_bytes` or what the budget leaves.

    Args:
        blocks_for: the most blocks that a request of so many tokens holds at any time; by default one for every
            `block_size_tokens`.
        planned_model_len: tokens of one request that a plan has room for.

    Raises:
        RuntimeFailure: OutOfMemory, when one request of `max_model_len` does not fit and the length was asked for, when
            one of `planned_model_len` does not, or when not even one block fits.
    """
    if blocks_for is None:
        blocks_for = partial(_blocks_for, block_size_tokens=block_size_tokens)
    blocks_per_request = blocks_for(max_model_len)
    planned_tokens = max_model_len if max_model_len_is_explicit else min(max_model_len, LEAST_LENGTH_TOKENS)
    planned_bytes = blocks_for(planned_tokens) * block_bytes
    pool_bytes = budget.pool_bytes(planned_bytes) if asked_bytes is None else asked_bytes
    num_blocks = min(pool_bytes // block_bytes, max(MOST_BLOCKS, blocks_per_request * max_num_seqs))
    if num_blocks >= blocks_per_request:
        return PoolSize(num_blocks, max_model_len)
    fits_tokens = bisect.bisect_right(range(max_model_len), num_blocks, lo=1, key=blocks_for) - 1
    is_enough = fits_tokens >= max(block_size_tokens, min(planned_model_len or 1, max_model_len))
    if is_enough and not max_model_len_is_explicit:
        return PoolSize(num_blocks, fits_tokens)
    source = f"--kv-cache-memory-bytes is {asked_bytes}" if asked_bytes is not None else str(budget)
    if planned_model_len is not None and fits_tokens >= block_size_tokens and not max_model_len_is_explicit:
        raise RuntimeFailure(
            FailureReason.OUT_OF_MEMORY,
            f"The KV cache holds a request of {fits_tokens} tokens, but {planned_model_len} were planned "
            f"(--planned-model-len): {source}; give more memory "
            "(podTemplate.spec.containers[runtime].resources.limits.memory), or name a length that is enough "
            "(--max-model-len, spec.engine.maxModelLen).",
        )
    if asked_bytes is None and budget.used_bytes >= budget.limit_bytes:
        raise RuntimeFailure(
            FailureReason.OUT_OF_MEMORY,
            f"Weights and process take {gibibytes(budget.used_bytes)}, and only {gibibytes(budget.limit_bytes)} are "
            f"usable, so there is no room for a KV cache{_of_planned(planned_model_len)}; give more memory "
            "(podTemplate.spec.containers[runtime].resources.limits.memory; on a GPU a larger one).",
        )
    raise RuntimeFailure(
        FailureReason.OUT_OF_MEMORY,
        f"The KV cache for one request of {max_model_len} tokens needs {gibibytes(blocks_per_request * block_bytes)}, "
        f"but {source}: that holds {fits_tokens} tokens; lower --max-model-len (engine.maxModelLen), or give more "
        "memory (podTemplate.spec.containers[runtime].resources.limits.memory; on a GPU a larger one).",
    )


def _of_planned(planned_model_len: int | None) -> str:
    return "" if planned_model_len is None else f" of the {planned_model_len} tokens that were planned"


def _blocks_for(num_tokens: int, block_size_tokens: int) -> int:
    return -(-num_tokens // block_size_tokens)


def gibibytes(num_bytes: int) -> str:
    """`1.50 GiB`, or MiB below a tenth of one."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 // 10 else f"{num_bytes / 2**20:.1f} MiB"
