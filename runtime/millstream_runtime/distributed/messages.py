"""Messages between rank 0 and the other ranks: typed, msgpack, never pickle. Imports no torch.

    Join ► Joined ► (LoadShard ► ShardLoaded ► Measure ► Measured ► Allocate ► (PrepareGraphs ► (RecordGraph ►
           GraphRecorded)*)? ► (StepInput | ZeroBlocks)*)* ► Leave
                                 anywhere: RankFailed, and the process ends

A step needs no reply: ranks meet in its sums. A configuration travels as itself and is checked again as it is decoded.
"""

from __future__ import annotations

import msgspec

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.execution.graphs.buckets import Bucket
from millstream_runtime.engine.execution.step_input import StepInput, ZeroBlocks
from millstream_runtime.engine.kernel_backends import KernelChoice
from millstream_runtime.errors import FailureReason, RuntimeFailure


class Join(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first command: join the process group."""

    rank: int
    size: int
    device_type: str  # "cuda" or "cpu"
    rendezvous: str  # a file in a folder of rank 0's own
    timeout_seconds: float  # of every exchange of tensors


class LoadShard(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Load this rank's share of a model, in place of any before, for these kernels."""

    config: RuntimeConfig
    kernels: list[KernelChoice] = []


class Measure(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Measure what a KV pool may take on this rank, beside graphs where there are any, with these kernels."""

    with_graphs: bool = False
    kernels: list[KernelChoice] = []


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Allocate the KV pool."""

    num_blocks: int
    num_padding_blocks: int = 0  # beyond them: see `KVCache`
    kernels: list[KernelChoice] = []  # that all ranks use


class PrepareGraphs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Be ready to record these buckets, and no others."""

    buckets: list[Bucket]


class RecordGraph(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Record a bucket; all ranks do at the same time."""

    bucket: Bucket


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End the process."""


class Joined(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """This process is about to join the process group."""


class ShardLoaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The share is on the device."""

    kernels: list[KernelChoice] = []  # as asked for, with torch and the reason where one cannot start


class Measured(msgspec.Struct, frozen=True, array_like=True, tag=True):
    available_bytes: int


class GraphRecorded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A bucket was recorded, and took so much; None: it could not be."""

    num_bytes: int | None


class RankFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Why a rank cannot continue; its process ends."""

    reason: FailureReason
    message: str

    def as_failure(self) -> RuntimeFailure:
        return RuntimeFailure(self.reason, self.message)


Command = Join | LoadShard | Measure | Allocate | PrepareGraphs | RecordGraph | StepInput | ZeroBlocks | Leave
Reply = Joined | ShardLoaded | Measured | GraphRecorded | RankFailed
