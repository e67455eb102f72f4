"""A rank beyond 0: `python -m millstream_runtime.distributed.follower LINK LIFELINE`. Only the leader starts it.

Both are inherited file descriptors. LINK carries commands and replies. Nothing is ever sent on LIFELINE: its end means
that the leader is gone, whatever this process waits for just then, and it leaves at once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from millstream_runtime.engine.execution.shard_config import resolve_shard_config

import millstream_runtime.engine  # noqa: F401 - sets OpenMP's environment, which torch reads as it loads  # isort: skip
import torch

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.distributed import process_group
from millstream_runtime.distributed.channel import Channel
from millstream_runtime.distributed.messages import (
    Allocate,
    Command,
    GraphRecorded,
    Join,
    Joined,
    Leave,
    LoadShard,
    Measure,
    Measured,
    PrepareGraphs,
    RankFailed,
    RecordGraph,
    Reply,
    ShardLoaded,
)
from millstream_runtime.distributed.probe import choose_small_sums, find_topology
from millstream_runtime.distributed.process_group import DistributedRanks
from millstream_runtime.engine.execution import rank_kernels, shard
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.execution.graphs.recorders import CudaRecorder, Recorder
from millstream_runtime.engine.execution.kernel_choice import backend_of
from millstream_runtime.engine.execution.last_tokens import LastTokens
from millstream_runtime.engine.execution.rank_kernels import Choices
from millstream_runtime.engine.execution.step_input import StepInput, ZeroBlocks
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.processes.memory_remedy import MEMORY_REMEDY

Link = Channel[Reply, Command]
Made = TypeVar("Made")
MakeRecorder = Callable[[torch.device], Recorder]


class Follower:
    """Executes commands; the state is what the last `LoadShard`, `Measure` and `Allocate` made."""

    def __init__(self, link: Link, ranks: DistributedRanks, make_recorder: MakeRecorder = CudaRecorder) -> None:
        """`make_recorder`: of the graphs on a device, where rank 0 asks for graphs."""
        self._link = link
        self._make_recorder = make_recorder
        self._ranks = ranks
        self._config: RuntimeConfig | None = None
        self._model: Decoder | None = None
        self._cache: KVCache | None = None
        self._forward: Forward | None = None

    def serve(self) -> None:
        """Until `Leave`, or the end of the stream."""
        while not isinstance(command := self._link.receive(), Leave | None):
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case StepInput():
                self._step(command)
            case ZeroBlocks(blocks):
                _made(self._forward).zero_blocks(blocks)
            case LoadShard(config, kernels):
                self._load(config, tuple(kernels))
            case Measure(with_graphs, kernels):
                config, model = _made(self._config), _made(self._model)
                budget = shard.measure_memory(
                    config, self._shard_config, model, self._ranks, with_graphs=with_graphs, kernels=kernels
                )
                self._link.send(Measured(budget.available_bytes))
            case Allocate():
                self._allocate(command)
            case PrepareGraphs(buckets):
                recorder = self._make_recorder(self._shard_config.device)
                backend = backend_of("static_decode", self._kernels)
                model, cache, rows = _made(self._model), _made(self._cache), _made(self._config).max_num_seqs
                _made(self._forward).graphs = shard.graphed_decodes(
                    model, cache, buckets, recorder, backend, self._ranks, num_rows=rows
                )
            case RecordGraph(bucket):
                recorded = _made(_made(self._forward).graphs).record(bucket)
                self._link.send(GraphRecorded(None if recorded is None else recorded.num_bytes))
            case Join() | Leave():
                raise RuntimeError(f"{type(command).__name__} comes at the beginning or the end")

    def _load(self, config: RuntimeConfig, kernels: Choices) -> None:
        self._forward = self._cache = self._model = None  # their memory, before there are two
        self._config = config
        self._shard_config = resolve_shard_config(config, self._ranks)
        loaded = rank_kernels.load(config, self._shard_config, self._ranks, kernels)
        self._model = loaded.model
        self._link.send(ShardLoaded(list(loaded.kernels)))

    def _allocate(self, command: Allocate) -> None:
        config, policy = _made(self._config), self._shard_config.policy
        self._cache = cache = shard.make_kv_cache(
            config,
            self._shard_config,
            command.num_blocks,
            self._ranks,
            num_padding_blocks=command.num_padding_blocks,
        )
        policy.after_loading()
        self._kernels = tuple(command.kernels)
        backend = backend_of("attention", self._kernels)
        self._forward = Forward(_made(self._model), cache, policy, backend=backend)
        self._last_tokens = LastTokens(config.max_num_seqs, self._forward.device, self._ranks)

    @torch.inference_mode()
    def _step(self, step: StepInput) -> None:
        forward = _made(self._forward)
        residual = forward.residual(step, lambda token_ids: self._last_tokens.fill(token_ids, step))
        for rows in step.head_rows:
            forward.logits(residual, rows)
        if step.kept_rows:
            self._last_tokens.receive(step.kept_rows)


def _made(value: Made | None) -> Made:
    if value is None:
        raise RuntimeError("a command came before the one that it builds on")
    return value


def main(link_fd: int, lifeline_fd: int, make_recorder: MakeRecorder = CudaRecorder) -> int:
    """Serve the leader until it sends `Leave`; return the exit code. `make_recorder`: see `Follower`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches a whole terminal; the leader decides what it means
    threading.Thread(target=_exit_with_leader, args=(lifeline_fd,), name="lifeline", daemon=True).start()
    connection = socket.socket(fileno=link_fd)
    connection.set_inheritable(False)
    os.set_inheritable(lifeline_fd, False)
    link: Link = Channel(connection, Command)
    join = link.receive()
    if not isinstance(join, Join):
        return 1
    try:
        ranks = _join(link, join)
        Follower(link, ranks, make_recorder).serve()
    except Exception as error:
        failure = as_failure(error, join.rank)
        link.send(RankFailed(failure.reason, failure.message))
        return 1
    ranks.leave()
    return 0


def as_failure(error: Exception, rank: int) -> RuntimeFailure:
    """Return the failure for the leader: memory exhaustion by name, a bug as a crash whose traceback is logged."""
    if isinstance(error, RuntimeFailure):
        return RuntimeFailure(error.reason, f"Rank {rank}: {error.message}")
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return RuntimeFailure(FailureReason.OUT_OF_MEMORY, f"Rank {rank} ran out of memory; {MEMORY_REMEDY}.")
    logging.getLogger("millstream").error("rank_crashed\n%s", "".join(traceback.format_exception(error)))
    return RuntimeFailure(
        FailureReason.RUNTIME_CRASHED,
        f"Rank {rank} stopped on an internal error ({type(error).__name__}); see the log.",
    )


def _join(link: Link, join: Join) -> DistributedRanks:
    device = torch.device("cpu")
    if join.device_type == "cuda":
        torch.cuda.set_device(join.rank)
        device = torch.device("cuda", join.rank)
    link.send(Joined())
    ranks = process_group.join(join.rank, join.size, device, Path(join.rendezvous), join.timeout_seconds)
    choose_small_sums(ranks, device, find_topology(ranks, device))
    return ranks


def _exit_with_leader(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)
    os._exit(1)


if __name__ == "__main__":
    code = main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stderr.flush()
    os._exit(code)  # without the interpreter's shutdown, which threads inside torch can hold up
