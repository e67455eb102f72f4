"""How a model comes from a configuration to all its ranks, with a KV pool of the same blocks on each.

rank 0 (Engine)                        the others (distributed.follower)
broadcast(LoadShard)   ────────────▶   the same `rank_kernels.load` on their shares
gather(ShardLoaded)    ◀────────────   a kernel that one of them cannot start is used by none
broadcast(Measure)     ────────────▶   the same `shard.measure_memory`
gather(Measured)       ◀────────────   the smallest budget decides, so that every pool has the same blocks
broadcast(Allocate)    ────────────▶
broadcast(RecordGraph) ────────────▶   for each bucket, where there are graphs
gather(GraphRecorded)  ◀────────────   a bucket that one of them cannot record is eager for all
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.distributed.messages import (
    Allocate,
    GraphRecorded,
    LoadShard,
    Measure,
    Measured,
    PrepareGraphs,
    RecordGraph,
    ShardLoaded,
)
from millstream_runtime.engine.eagle.head_shard import LoadedHead
from millstream_runtime.engine.execution import draft_shard, drafts, rank_kernels, shard
from millstream_runtime.engine.execution.draft_shard import DraftShard, LoadedDraft
from millstream_runtime.engine.execution.drafts import DraftWeights
from millstream_runtime.engine.execution.execution_mode import Execution, after_loading, choose
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.execution.graphs.buckets import Bucket
from millstream_runtime.engine.execution.graphs.graphed_decodes import GraphCost, GraphedDecodes, GraphPlan
from millstream_runtime.engine.execution.kernel_choice import (
    COMPILED_ATTENTION,
    DENSE_LINEAR,
    SAMPLER,
    backend_of,
    choose_compiled,
    choose_kernels,
)
from millstream_runtime.engine.execution.rank_group import RankGroup
from millstream_runtime.engine.execution.rank_kernels import Choices, LoadedShard
from millstream_runtime.engine.execution.shard_config import ShardConfig, resolve_shard_config, weights_reason
from millstream_runtime.engine.kernel_backends import Backend, KernelChoice, LinearChoice
from millstream_runtime.engine.kv import pool_size
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.medusa.medusa_shard import LoadedMedusa
from millstream_runtime.kv_layout import KVLayout
from millstream_runtime.logs import log
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.linear.shares import rank_config
from millstream_runtime.models.linear.tensor_parallel import Ranks
from millstream_runtime.models.registry import OnRead

OnPhase = Callable[[str, str], None]


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
    on_phase: OnPhase,
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
    loading = _Loading(config, resolve_shard_config(config, rank_group.ranks), rank_group, on_phase)
    weights = loading.load_weights(on_read, execution)
    on_phase("SizingKVCache", f"{pool_size.gibibytes(weights.model.weight_bytes)} of weights are loaded.")
    budget, pool = loading.size_pools(weights)
    forward, cache = loading.allocate(weights, pool)
    graph_plan = loading.record_graphs(weights, forward, cache, pool)
    graphs_bytes = 0 if graph_plan is None else graph_plan.use.num_bytes
    use = shard.memory_use(config, weights.model, cache, pool, budget, graphs_bytes)
    draft = loading.make_draft(weights, forward, cache, pool)
    if draft is not None:
        use = replace(use, draft_weights_bytes=draft.weights_bytes, draft_kv_cache_bytes=draft.kv_cache_bytes)
    return LoadedModel(
        shard_config=loading.shard_config,
        forward=forward,
        pool=pool,
        layout=cache.layout,
        memory_use=use,
        execution=weights.execution,
        kernels=weights.kernels,
        kernel_lookups=weights.kernel_lookups,
        linears=_linears(weights.model),
        draft=draft,
        graph_plan=graph_plan,
    )


@dataclass(frozen=True, slots=True)
class _Weights:
    """Rank 0's weights, and the draft's: what computes with them, and how."""

    model: Decoder
    kernels: Choices
    kernel_lookups: Mapping[str, int]
    execution: Execution
    draft: tuple[DraftShard, DraftWeights] | None

    @property
    def draft_shard(self) -> DraftShard | None:
        return None if self.draft is None else self.draft[0]


@dataclass(frozen=True, slots=True)
class _Loading:
    """The steps of `load_on_ranks`, in order. Each does the same on all ranks."""

    config: RuntimeConfig
    shard_config: ShardConfig
    rank_group: RankGroup
    on_phase: OnPhase

    def load_weights(self, on_read: OnRead | None, execution: Execution | None) -> _Weights:
        """Load the draft's weights, then those of every rank."""
        config, shard_config = self.config, self.shard_config
        chosen = execution or choose(config, shard_config.device)
        kernels = _choose_kernels(config, shard_config, self.rank_group.ranks, chosen)
        resolved = drafts.resolve(config, shard_config)
        self.rank_group.broadcast(LoadShard(config, _of_others(kernels)))
        draft = None if resolved is None else (resolved, drafts.load(config, shard_config, resolved))
        model, kernels, lookups = _load_alike(config, shard_config, self.rank_group, kernels, on_read)
        if execution is None:
            chosen = after_loading(chosen, model)
        return _Weights(model, kernels, lookups, chosen, draft)

    def size_pools(self, weights: _Weights) -> tuple[pool_size.MemoryBudget, pool_size.PoolSize]:
        """Return rank 0's budget, and the blocks that fit into the smallest budget of all ranks."""
        config, shard_config, ranks = self.config, self.shard_config, self.rank_group.ranks
        draft, has_graphs = weights.draft_shard, weights.execution.recorder is not None
        self.rank_group.broadcast(Measure(has_graphs, _of_others(weights.kernels)))
        draft_step_bytes = 0 if draft is None else drafts.largest_step_bytes(config, shard_config, draft)
        with self.rank_group.computing():
            budget = shard.measure_memory(
                config,
                shard_config,
                weights.model,
                ranks,
                with_graphs=has_graphs,
                kernels=weights.kernels,
                draft_step_bytes=draft_step_bytes,
            )
        others = [one.available_bytes for one in self.rank_group.gather(Measured)]
        smallest = replace(budget, available_bytes=min([budget.available_bytes, *others]))
        return budget, draft_shard.size_pools(config, shard_config, smallest, ranks, draft)

    def allocate(self, weights: _Weights, pool: pool_size.PoolSize) -> tuple[Forward, KVCache]:
        """Allocate the pool on every rank."""
        config, shard_config, ranks = self.config, self.shard_config, self.rank_group.ranks
        padding_blocks = 0 if weights.execution.recorder is None else KVCache.PADDING_BLOCKS
        self.rank_group.broadcast(Allocate(pool.num_blocks, padding_blocks, _of_others(weights.kernels)))
        cache = shard.make_kv_cache(config, shard_config, pool.num_blocks, ranks, num_padding_blocks=padding_blocks)
        shard_config.policy.after_loading()
        backend = backend_of("attention", weights.kernels)
        return Forward(weights.model, cache, shard_config.policy, backend=backend), cache

    def record_graphs(
        self, weights: _Weights, forward: Forward, cache: KVCache, pool: pool_size.PoolSize
    ) -> GraphPlan | None:
        """Record the graphs of decodes on all ranks; None: every step is eager."""
        recorder = weights.execution.recorder
        if recorder is None:
            return None
        backend = backend_of("static_decode", weights.kernels)
        plan = shard.plan_graphs(self.config, weights.model, cache, pool.max_model_len, backend)
        if plan is None:
            return None
        forward.graphs = shard.graphed_decodes(
            weights.model,
            cache,
            plan.buckets.to_record(),
            recorder,
            backend,
            self.rank_group.ranks,
            num_rows=self.config.max_num_seqs,
        )
        _record_graphs(self.rank_group, plan, forward.graphs, self.on_phase)
        return plan

    def make_draft(
        self, weights: _Weights, forward: Forward, cache: KVCache, pool: pool_size.PoolSize
    ) -> LoadedDraft | LoadedHead | LoadedMedusa | None:
        """Allocate the draft's pools, which rank 0 alone has."""
        if weights.draft is None:
            return None
        draft, draft_weights = weights.draft
        return drafts.make(self.config, self.shard_config, draft, draft_weights, forward, cache.layout, pool.num_blocks)


def _linears(model: Decoder) -> tuple[LinearChoice, ...]:
    scheme = model.config.quantization
    is_rounded = scheme is not None and scheme.is_rounded_while_loading
    return tuple(LinearChoice(words, why, count, is_rounded) for (words, why), count in model.implementations.items())


def _record_graphs(rank_group: RankGroup, plan: GraphPlan, graphs: GraphedDecodes, on_phase: OnPhase) -> None:
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
    problem = shard_config.policy.compiled_problem
    if problem is not None:
        log.warning("no_compiled_kernels", problem=problem, effect="torch computes in their place, slower")
    compiled = choose_compiled(shape, shard_config.arithmetic, stored, problem)
    if execution.backend is Backend.TORCH or execution.recorder is not None:
        # A graph holds operations of torch, and a replayed decode has attention of its own.
        compiled = tuple(choice for choice in compiled if choice.part in COMPILED_ATTENTION)
    backend = Backend.NUMBA if shard_config.arithmetic.is_mixed else Backend.TORCH
    compiled += (KernelChoice(DENSE_LINEAR, backend, weights_reason(config, shard_config)),)
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
