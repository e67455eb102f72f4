"""The ranks that compute together, as rank 0 sees them, and how they come from a configuration to a shared KV pool.

    rank 0 (Engine)                        the others (distributed.follower)
    broadcast(LoadShard)   ────────────▶   the same `rank_kernels.load` on their shares
    gather(ShardLoaded)    ◀────────────   a kernel that one of them cannot start is used by none
    broadcast(Measure)     ────────────▶   the same `shard.measure_memory`
    gather(Measured)       ◀────────────   the smallest budget decides, so that every pool has the same blocks
    broadcast(Allocate)    ────────────▶
    broadcast(RecordGraph) ────────────▶   for each bucket, where there are graphs
    gather(GraphRecorded)  ◀────────────   a bucket that one of them cannot record is eager for all

With one rank, `broadcast` and `gather` do nothing, and all else is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.distributed.messages import (
    Allocate,
    Command,
    GraphRecorded,
    LoadShard,
    Measure,
    Measured,
    PrepareGraphs,
    RecordGraph,
    ShardLoaded,
)
from millstream_runtime.distributed.topology import Topology
from millstream_runtime.engine.eagle.head_shard import LoadedHead
from millstream_runtime.engine.execution import draft_shard, drafts, rank_kernels, shard
from millstream_runtime.engine.execution.draft_shard import LoadedDraft
from millstream_runtime.engine.execution.execution_mode import Execution, after_loading, choose
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.execution.graphs.buckets import Bucket
from millstream_runtime.engine.execution.graphs.graphed_decodes import GraphCost, GraphedDecodes, GraphPlan
from millstream_runtime.engine.execution.kernel_choice import (
    COMPILED_ATTENTION,
    SAMPLER,
    backend_of,
    choose_compiled,
    choose_kernels,
)
from millstream_runtime.engine.execution.rank_kernels import Choices, LoadedShard
from millstream_runtime.engine.execution.shard_config import ShardConfig, resolve_shard_config
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice, LinearChoice
from millstream_runtime.engine.kv import pool_size
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.medusa.medusa_shard import LoadedMedusa
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.kv_layout import KVLayout
from millstream_runtime.logs import log
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.linear.shares import rank_config
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS, Ranks
from millstream_runtime.models.registry import OnRead, expected_weights

Reply = TypeVar("Reply", ShardLoaded, Measured, GraphRecorded)
OnLost = Callable[[RuntimeFailure], None]


class RankGroup(Protocol):
    """Rank 0's view of all ranks."""

    on_lost: OnLost  # called once, by any thread, when a rank is gone or stuck: nothing can be computed any more

    @property
    def ranks(self) -> Ranks: ...
    @property
    def topology(self) -> Topology | None: ...
    @property
    def is_lost(self) -> bool: ...

    def check(self) -> None:
        """Raises RuntimeFailure: a rank is gone or stuck."""

    def broadcast(self, command: Command) -> None:
        """Send a command to every other rank.

        Raises:
            RuntimeFailure: one of them is gone.
        """

    def gather(self, kind: type[Reply]) -> list[Reply]:
        """The next reply of every other rank.

        Raises:
            RuntimeFailure: what one of them failed with, or that it is gone.
        """

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Around work in which ranks exchange tensors: its errors become a RuntimeFailure that names the lost rank."""

    def close(self) -> None:
        """End the other ranks."""


class SingleRank:
    """One rank."""

    ranks: Ranks = SINGLE_PROCESS
    topology: Topology | None = None
    is_lost = False

    def __init__(self) -> None:
        self.on_lost: OnLost = lambda failure: None

    def check(self) -> None:
        return

    def broadcast(self, command: Command) -> None:
        return

    def gather(self, kind: type[Reply]) -> list[Reply]:
        return []

    def computing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        return


def start_rank_group(config: RuntimeConfig) -> RankGroup:
    """Start the ranks that the configuration asks for.

    Raises:
        RuntimeFailure: InvalidConfig where the model or the machine cannot be shared so, before anything is started;
            NCCLFailed where the ranks do not find each other.
    """
    if config.tensor_parallel_size == 1:
        return SingleRank()
    from millstream_runtime.distributed.leader import Leader
    from millstream_runtime.models.linear.tensor_parallel import PlannedRanks

    planned = PlannedRanks(0, config.tensor_parallel_size)
    shard_config = resolve_shard_config(config, planned)
    expected_weights(shard_config.model_config, shard_config.dtype, planned)
    return Leader(config.tensor_parallel_size, shard_config.device)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on all its ranks, ready to compute: rank 0's part of it, and what holds for all ranks."""

    shard_config: ShardConfig
    forward: Forward
    pool: pool_size.PoolSize
    layout: KVLayout
    memory_use: pool_size.MemoryUse  # rank 0's
    execution: Execution
    kernels: tuple[KernelChoice, ...]
    kernel_lookups: Mapping[str, int]  # of variants that were compiled ahead, by result
    linears: tuple[LinearChoice, ...]  # of quantized layers, of rank 0's
    draft: LoadedDraft | LoadedHead | LoadedMedusa | None = None
    graph_plan: GraphPlan | None = None  # None: every step is eager


def load_on_ranks(
    config: RuntimeConfig,
    rank_group: RankGroup,
    on_phase: Callable[[str, str], None],
    on_read: OnRead | None = None,
    execution: Execution | None = None,
) -> LoadedModel:
    """Load every rank's share and give all of them a KV pool of the same blocks.

    Args:
        on_read: `on_read(done_bytes, total_bytes)` of rank 0's share.
        execution: overrides what `execution_mode` says.

    Raises:
        RuntimeFailure: what any rank failed with.
    """
    ranks = rank_group.ranks
    shard_config = resolve_shard_config(config, ranks)
    chosen = execution or choose(config, shard_config.device)
    kernels = _choose_kernels(config, shard_config, ranks, chosen)
    draft = drafts.resolve(config, shard_config)
    rank_group.broadcast(LoadShard(config, _of_others(kernels)))
    draft_model = None if draft is None else drafts.load(config, shard_config, draft)
    model, kernels, lookups = _load_alike(config, shard_config, rank_group, kernels, on_read)
    if execution is None:
        chosen = after_loading(chosen, model)
    recorder = chosen.recorder
    on_phase("SizingKVCache", f"{pool_size.gibibytes(model.weight_bytes)} of weights are loaded.")
    rank_group.broadcast(Measure(recorder is not None, _of_others(kernels)))
    draft_step_bytes = 0 if draft is None else drafts.largest_step_bytes(config, shard_config, draft)
    with rank_group.computing():
        budget = shard.measure_memory(
            config,
            shard_config,
            model,
            ranks,
            with_graphs=recorder is not None,
            kernels=kernels,
            draft_step_bytes=draft_step_bytes,
        )
    available_bytes = min([budget.available_bytes, *(one.available_bytes for one in rank_group.gather(Measured))])
    pool = draft_shard.size_pools(config, shard_config, replace(budget, available_bytes=available_bytes), ranks, draft)
    padding_blocks = 0 if recorder is None else KVCache.PADDING_BLOCKS
    rank_group.broadcast(Allocate(pool.num_blocks, padding_blocks, _of_others(kernels)))
    cache = shard.make_kv_cache(config, shard_config, pool.num_blocks, ranks, num_padding_blocks=padding_blocks)
    shard_config.policy.after_loading()
    forward = Forward(model, cache, shard_config.policy, backend=backend_of("attention", kernels))
    plan = None
    if recorder is not None:
        backend = backend_of("static_decode", kernels)
        plan = shard.plan_graphs(config, model, cache, pool.max_model_len, backend)
        if plan is not None:
            buckets = plan.buckets.to_record()
            rows = config.max_num_seqs
            forward.graphs = shard.graphed_decodes(model, cache, buckets, recorder, backend, ranks, num_rows=rows)
            _record_graphs(rank_group, plan, forward.graphs, on_phase)
    graphs_bytes = 0 if plan is None else plan.use.num_bytes
    use = shard.memory_use(config, model, cache, pool, budget, graphs_bytes)
    loaded_draft = None
    if draft is not None and draft_model is not None:
        loaded_draft = drafts.make(config, shard_config, draft, draft_model, forward, cache.layout, pool.num_blocks)
        use = replace(
            use, draft_weights_bytes=loaded_draft.weights_bytes, draft_kv_cache_bytes=loaded_draft.kv_cache_bytes
        )
    return LoadedModel(
        shard_config, forward, pool, cache.layout, use, chosen, kernels, lookups, _linears(model), loaded_draft, plan
    )


def _linears(model: Decoder) -> tuple[LinearChoice, ...]:
    scheme = model.config.quantization
    is_rounded = scheme is not None and scheme.is_rounded_while_loading
    return tuple(LinearChoice(words, why, count, is_rounded) for (words, why), count in model.implementations.items())


def _record_graphs(
    rank_group: RankGroup, plan: GraphPlan, graphs: GraphedDecodes, on_phase: Callable[[str, str], None]
) -> None:
    """Record each bucket on all ranks together; one that a rank refuses is replayed by none."""
    rank_group.broadcast(PrepareGraphs(plan.buckets.to_record()))

    def record(bucket: Bucket) -> GraphCost | None:
        rank_group.broadcast(RecordGraph(bucket))
        with rank_group.computing():
            own = graphs.record(bucket)
        others = [one.num_bytes for one in rank_group.gather(GraphRecorded)]
        recorded = [one for one in others if one is not None]
        if own is None or len(recorded) < len(others):
            graphs.forget(bucket)
            return None
        return GraphCost(own.seconds, max([own.num_bytes, *recorded]))

    plan.record_all(record, lambda message: on_phase("WarmingUp", message))


def _choose_kernels(
    config: RuntimeConfig, shard_config: ShardConfig, ranks: Ranks, execution: Execution
) -> tuple[KernelChoice, ...]:
    shape, stored, dtype = rank_config(shard_config.model_config, ranks), config.kv_cache_dtype, shard_config.dtype
    chosen = choose_kernels(shape, shard_config.device, dtype, stored, config.block_size_tokens, execution.backend)
    attends_by_triton = Backend.TRITON in (execution.backend, backend_of("attention", chosen))
    if shard_config.device.type != "cpu" or attends_by_triton:
        return chosen
    compiled = choose_compiled(shape, dtype, stored, shard_config.policy.compiled_problem)
    if execution.backend is Backend.TORCH or execution.recorder is not None:
        # A graph holds operations of torch, and a replayed decode has attention of its own.
        compiled = tuple(choice for choice in compiled if choice.part in COMPILED_ATTENTION)
    replaced = {choice.part for choice in compiled}
    return (*compiled, *(choice for choice in chosen if choice.part not in replaced))


def _of_others(kernels: Choices) -> list[KernelChoice]:
    """The choices that ranks beyond 0 receive: they do not sample."""
    return [choice for choice in kernels if choice.part != SAMPLER]


def _load_alike(
    config: RuntimeConfig,
    shard_config: ShardConfig,
    rank_group: RankGroup,
    kernels: Choices,
    on_read: OnRead | None,
) -> LoadedShard:
    """Load rank 0's share, and again on all ranks where one of them cannot start what weights lie for.

    The others load by `kernels` already. Each round has fewer kernels, so it ends.
    """
    while True:
        loaded = rank_kernels.load(config, shard_config, rank_group.ranks, kernels, on_read)
        by_rank = [loaded.kernels, *(tuple(one.kernels) for one in rank_group.gather(ShardLoaded))]
        kernels = rank_kernels.agree(by_rank)
        if all(rank_kernels.lies_for(kernels, choices) for choices in by_rank):
            for choice in kernels:
                log.info("kernels", part=choice.part, backend=choice.backend.value, reason=choice.reason)
            return loaded._replace(kernels=kernels)
        log.warning("kernel_problem", problem="a rank cannot start a kernel; the weights are read again, for torch")
        del loaded  # its memory, before there are two
        rank_group.broadcast(LoadShard(config, _of_others(kernels)))
