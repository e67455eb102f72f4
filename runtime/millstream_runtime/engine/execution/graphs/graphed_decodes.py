"""CUDA graphs: which buckets are recorded at boot, which step is replayed from one, and the replay itself.

At batch 1 a small model's step is hundreds of kernels of a few microseconds, and launching them takes longer than
running them. A CUDA graph launches all of them at once.

    step of decodes ── its bucket ──┬── recorded ── fill buffers, replay ──▶ residual
      (`GraphPlan`, on rank 0)      │   (`GraphedDecodes`, on every rank)
                                    └── none ──────────────────────────────▶ eager

All recordings happen before the first request, in the order of `Buckets.to_record`, until they have taken their budget
of memory or RECORDING_SECONDS. A recording under traffic would halt every running request for 30 to 80 ms. What is not
recorded is eager for good: too large for the memory (`graph_budget`), beyond the budget, or refused because it cannot
be recorded. How many of each is logged.

Rank 0 alone decides which step is replayed and says so in the step: ranks that decided by themselves could differ by
their memory, and a collective would wait for one that never comes. All ranks record a bucket together, because a
recording computes the pass, sums included.

No `torch.compile`: it would compile at every cold start, and a pod is to be Ready in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millstream_runtime.engine.execution.graphs.buckets import Bucket, Buckets
from millstream_runtime.engine.execution.graphs.recorders import CaptureError, Recorded, Recorder
from millstream_runtime.engine.execution.graphs.static_decode import StaticDecode
from millstream_runtime.engine.execution.step_input import ChunkInput, StepInput
from millstream_runtime.logs import log

FillTokens = Callable[[Tensor], None]
RECORDING_SECONDS = 10.0  # of a boot: a bucket takes 30 to 80 ms on an H200, and there are up to 250
BUCKETS_PER_MESSAGE = 16  # of the boot's progress


def leave_tokens(token_ids: Tensor) -> None:
    """All tokens of a step came from the host."""


class GraphedDecodes:
    """Replays steps of decodes from what was recorded."""

    def __init__(self, decode: StaticDecode, recorder: Recorder, *, is_only_rank: bool = True) -> None:
        """`recorder`: of this rank's device."""
        self._decode = decode
        self._recorder = recorder
        self._is_only_rank = is_only_rank
        self._replays: dict[Bucket, Callable[[], None]] = {}

    @torch.inference_mode()
    def record(self, bucket: Bucket) -> Recorded | None:
        """Record a step of padding: warming up computes it for real, and it must write into no request's blocks.

        Returns:
            What it took; None where it cannot be recorded.

        Raises:
            RuntimeError: with several ranks, the computation before the capture failed. The others wait in it for this
                rank, so it has to end.
        """
        self._decode.fill_with_padding(bucket)
        try:
            recorded = self._recorder.record(lambda: self._decode.compute(bucket))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not self._is_only_rank and not isinstance(error, CaptureError):
                raise
            log.warning("graph_refused", **bucket._asdict(), error=type(error.__cause__ or error).__name__)
            return None
        self._replays[bucket] = recorded.replay
        return recorded

    def forget(self, bucket: Bucket) -> None:
        """Drop what was recorded of a bucket, if anything was."""
        self._replays.pop(bucket, None)

    def residual(self, bucket: Bucket, step: StepInput, fill: FillTokens = leave_tokens) -> Tensor:
        """The residual stream `[T, hidden]` of a step, a view until the next, by a bucket that was recorded.

        `fill`: see `Forward.residual`.
        """
        fill(self._decode.fill(bucket, step).token_ids)
        self._replays[bucket]()
        return self._decode.residual(len(step.chunks))


@dataclass(frozen=True, slots=True)
class GraphCost:
    """What a recording took: of all ranks the largest memory."""

    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GraphUse:
    """What graphs were recorded, what that took, and which steps they served."""

    num_graphs: int = 0
    num_refused: int = 0  # buckets that could not be recorded
    num_left: int = 0  # buckets that were left eager because the budget of memory or time was spent
    seconds: float = 0.0  # of all recordings
    num_bytes: int = 0  # of device memory
    replayed_steps: int = 0
    eager_steps: int = 0  # of decodes only, for want of a bucket or of its graph


class GraphPlan:
    """Chooses the buckets of steps."""

    def __init__(self, buckets: Buckets, block_size_tokens: int, budget_bytes: int | None = None) -> None:
        """`budget_bytes`: once graphs have taken so much, no more are recorded; None is no bound."""
        self.buckets = buckets
        self._block_size_tokens = block_size_tokens
        self.budget_bytes = budget_bytes
        self._recorded: set[Bucket] = set()
        self.use = GraphUse()

    def record_all(self, record: Callable[[Bucket], GraphCost | None], on_progress: Callable[[str], None]) -> GraphUse:
        """Record what the budget allows.

        Args:
            record: records a bucket on all ranks; None where one of them cannot.
            on_progress: receives how far the recording is, in words.
        """
        wanted = self.buckets.to_record()
        for number, bucket in enumerate(wanted):
            if not self._may_record():
                self.use = replace(self.use, num_left=len(wanted) - number)
                break
            if number % BUCKETS_PER_MESSAGE == 0:
                on_progress(f"Recording CUDA graphs: {number} of {len(wanted)}.")
            self._count(bucket, record(bucket))
        log.info(
            "graphs_recorded",
            graphs=self.use.num_graphs,
            refused=self.use.num_refused,
            left_eager=self.use.num_left,
            seconds=round(self.use.seconds, 3),
            bytes=self.use.num_bytes,
        )
        return self.use

    def bucket_of(self, chunks: Sequence[ChunkInput]) -> Bucket | None:
        """The bucket that a step of these chunks is replayed from; None: the step is eager."""
        if chunks[-1].num_tokens > 1:
            return None
        longest = max(chunk.context_len for chunk in chunks)
        contiguous = all(chunk.is_contiguous for chunk in chunks)
        width_blocks = -(-longest // self._block_size_tokens)
        bucket = self.buckets.holding(len(chunks), width_blocks, contiguous=contiguous)
        if bucket not in self._recorded:
            self.use = replace(self.use, eager_steps=self.use.eager_steps + 1)
            return None
        self.use = replace(self.use, replayed_steps=self.use.replayed_steps + 1)
        return bucket

    def _may_record(self) -> bool:
        has_memory = self.budget_bytes is None or self.use.num_bytes < self.budget_bytes
        return has_memory and self.use.seconds < RECORDING_SECONDS

    def _count(self, bucket: Bucket, cost: GraphCost | None) -> None:
        if cost is None:
            self.use = replace(self.use, num_refused=self.use.num_refused + 1)
            return
        self._recorded.add(bucket)
        self.use = replace(
            self.use,
            num_graphs=self.use.num_graphs + 1,
            seconds=self.use.seconds + cost.seconds,
            num_bytes=self.use.num_bytes + cost.num_bytes,
        )
