"""Recorded passes of one rank: `record` a bucket, then replay it for steps of decodes that it holds.

At batch 1 a small model's step is hundreds of kernels of a few microseconds, and launching them takes longer than
running them. A CUDA graph launches all of them at once.

    step of decodes ── its bucket ──┬── recorded ── fill buffers, replay ──▶ residual
      (`graph_plan` on rank 0)      └── none ──────────────────────────────▶ eager

Rank 0 alone decides which step is replayed and says so in the step: ranks that decided by themselves could differ by
their memory, and a collective would wait for one that never comes. All ranks record a bucket together, because a
recording computes the pass, sums included.

No `torch.compile`: it would compile at every cold start, and a pod is to be Ready in seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millstream_runtime.engine.execution.buckets import Bucket
from millstream_runtime.engine.execution.recorders import CaptureError, Recorded, Recorder
from millstream_runtime.engine.execution.static_decode import StaticDecode
from millstream_runtime.engine.execution.step_input import StepInput
from millstream_runtime.logs import log

FillTokens = Callable[[Tensor], None]


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
