"""How a pass is recorded once and run again and again: the only file that touches `torch.cuda`'s graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

WARM_UP_RUNS = 2  # libraries choose algorithms and take workspaces at their first call, which a graph must not hold


@dataclass(frozen=True, slots=True)
class Recorded:
    """A pass that can be run again by `replay`, on the same memory, and what recording it took."""

    replay: Callable[[], None]
    seconds: float
    num_bytes: int  # of device memory, that stay taken


class CaptureError(RuntimeError):
    """A pass was computed and could not be recorded; nothing of it was exchanged with other ranks in the attempt."""


class Recorder(Protocol):
    """Records passes. Their memory may be shared, so one of them runs at a time."""

    def record(self, compute: Callable[[], None]) -> Recorded:
        """`compute` reads and writes the same tensors at each call. It may be called several times, as often on every
        rank.

        Raises:
            CaptureError: it cannot be recorded, or there is no memory for its graph.
            RuntimeError: it cannot be computed, or there is no memory for that (`torch.OutOfMemoryError`).
        """


class CudaRecorder:
    """CUDA graphs, all with one memory pool: they run one after another, so each may use what the last one used.

    That holds because nothing inside a graph outlives it: inputs and results lie in buffers from outside. (As in vLLM's
    `CUDAGraphWrapper` and mini-sglang's graph runner.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None]) -> Recorded:
        began = time.perf_counter()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # or memory that is freed meanwhile would count against what the graph takes
        free_before_bytes, _ = torch.cuda.mem_get_info(self._device)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Errors of other threads' CUDA calls are theirs: only this one's may end the recording.
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                compute()
        except RuntimeError as error:
            raise CaptureError(str(error)) from error
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what the warm-up runs took
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return Recorded(graph.replay, time.perf_counter() - began, max(0, free_before_bytes - free_bytes))
