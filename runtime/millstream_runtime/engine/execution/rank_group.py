"""The ranks that compute together, as rank 0 sees them, and how they come from a configuration to a shared KV pool.

    rank 0 (Engine)                    the others (distributed.follower)
    tell(LoadShard)       ──────────────▶   the same `shard.load` on their shares
    hear(ShardLoaded)     ◀──────────────
    tell(Measure)    ──────────────▶   the same `shard.measure_memory`
    hear(Measured)   ◀──────────────   the least room decides, so that every pool has the same blocks
    tell(Allocate)   ──────────────▶

With one rank there is nobody to tell, and nothing else differs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.distributed.messages import Allocate, Command, LoadShard, Measure, Measured, ShardLoaded
from millstream_runtime.distributed.topology import Topology
from millstream_runtime.engine.cpu.side_thread import SideThread
from millstream_runtime.engine.execution import shard
from millstream_runtime.engine.execution.execution_mode import Execution, choose
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.kv import pool_size
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.models.linear.tensor_parallel import ALONE, Ranks
from millstream_runtime.models.registry import OnRead, expected_weights

Reply = TypeVar("Reply", ShardLoaded, Measured)
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

    ranks: Ranks = ALONE
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
    """The ranks that the configuration asks for, started.

    Raises:
        RuntimeFailure: InvalidConfig where the model or the machine cannot be shared so, before anything is started;
            NCCLFailed where the ranks do not find each other.
    """
    if config.tensor_parallel_size == 1:
        return SingleRank()
    from millstream_runtime.distributed.leader import Leader
    from millstream_runtime.models.linear.tensor_parallel import Planned

    planned = Planned(0, config.tensor_parallel_size)
    placement = shard.place(config, planned)
    expected_weights(placement.model_config, placement.dtype, planned)
    return Leader(config.tensor_parallel_size, placement.device)


@dataclass(frozen=True, slots=True)
class Assembled:
    """A model on all its ranks, ready to compute: rank 0's part of it, and what all agreed on."""

    placement: shard.Placement
    forward: Forward
    pool: pool_size.PoolSize
    memory_use: pool_size.MemoryUse  # rank 0's
    execution: Execution


def assemble(
    config: RuntimeConfig,
    rank_group: RankGroup,
    on_phase: Callable[[str, str], None],
    on_read: OnRead | None = None,
    execution: Execution | None = None,
) -> Assembled:
    """LoadShard every rank's share and give all of them a pool of the same blocks.

    Args:
        on_read: told how far rank 0 has read its share.
        execution: where it is not what `execution.choose` says.

    Raises:
        RuntimeFailure: what any rank failed with.
    """
    ranks = rank_group.ranks
    placement = shard.place(config, ranks)
    if execution is None:
        execution = choose(config, placement.model_config, placement.device, ranks.size)
    recorder = execution.recorder
    rank_group.broadcast(LoadShard(config))
    model = shard.load(config, placement, ranks, on_read)
    rank_group.gather(ShardLoaded)
    on_phase("SizingKVCache", f"{pool_size.gibibytes(model.weight_bytes)} of weights are loaded.")
    rank_group.broadcast(Measure())
    with rank_group.computing():
        ledger = shard.measure_memory(config, placement, model, ranks, with_graphs=recorder is not None)
    room = min([ledger.available_bytes, *(one.available_bytes for one in rank_group.gather(Measured))])
    pool = shard.size_pool(config, placement, replace(ledger, available_bytes=room), ranks)
    rank_group.broadcast(Allocate(pool.num_blocks))
    padding_blocks = 0 if recorder is None else KVCache.PADDING_BLOCKS
    cache = shard.make_cache(config, placement, pool.num_blocks, ranks, num_padding_blocks=padding_blocks)
    shard.keep_freed_memory(placement)
    side = SideThread(execution.side_threads) if execution.side_threads else None
    forward = Forward(model, cache, placement.device, side=side)
    graphs_bytes = 0
    if recorder is not None:
        on_phase("WarmingUp", "Recording the first CUDA graphs.")
        forward.graphs = shard.graphed_decodes(config, model, cache, pool.max_model_len, recorder)
        if forward.graphs is not None:
            graphs_bytes = forward.graphs.record_first().num_bytes
    use = shard.memory_use(model, cache, ledger, graphs_bytes)
    return Assembled(placement, forward, pool, use, execution)
