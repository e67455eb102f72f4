"""The ranks that compute together, as rank 0 sees them: what it sends to the others, and what they reply.

With one rank, `broadcast` and `gather` do nothing, and all else is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol, TypeVar

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.distributed.messages import Command, GraphRecorded, Measured, ShardLoaded
from millstream_runtime.distributed.topology import Topology
from millstream_runtime.engine.execution.shard_config import resolve_shard_config
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS, Ranks
from millstream_runtime.models.registry import expected_weights

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
    expected_weights(shard_config.model_config, shard_config.arithmetic, planned)
    return Leader(config.tensor_parallel_size, shard_config.device)
