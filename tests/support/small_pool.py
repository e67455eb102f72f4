"""Engines with a KV pool of few blocks, so that requests run short of them: the smallest config is too roomy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.execution import shard
from millstream_runtime.engine.execution.shard_config import ShardConfig
from millstream_runtime.engine.kv.pool_size import PoolSize
from millstream_runtime.engine.scheduling.hybrid_block_manager import make_block_manager
from millstream_runtime.engine.scheduling.scheduler import Scheduler


def shrink_pool(
    engine: Engine,
    num_blocks: int,
    *,
    block_size_tokens: int = 16,
    enable_prefix_caching: bool = False,
    frees_outside_window: bool = True,
) -> None:
    """Give the engine a block manager over the first `num_blocks` of its pool.

    Without `frees_outside_window` a model with windows keeps all its blocks, so that it runs short as others do.
    """
    old = engine._scheduler
    rows = len(old._free_rows)
    engine._blocks = make_block_manager(
        engine._blocks.windows if frees_outside_window else (None,),
        num_blocks,
        block_size_tokens,
        rows,
        lookahead_tokens=old._max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
    engine._scheduler = Scheduler(engine._blocks, old._max_num_batched_tokens, rows)
    engine._accepting = replace(engine._accepting, blocks=engine._blocks, scheduler=engine._scheduler)


@contextmanager
def small_pools(longest_tokens: int, spare_blocks: int) -> Iterator[None]:
    """Engines that are made meanwhile have a pool that holds one request of `longest_tokens`, and `spare_blocks` more.

    The pool itself ends there, on all ranks.
    """
    size_pool = shard.size_pool

    def size_small(config: RuntimeConfig, shard_config: ShardConfig, *others: Any) -> PoolSize:
        least = shard.request_blocks(config, shard_config).most(longest_tokens)
        return replace(size_pool(config, shard_config, *others), num_blocks=least + spare_blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "size_pool", size_small)
        yield
