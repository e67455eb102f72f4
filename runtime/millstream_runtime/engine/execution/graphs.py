"""The CUDA-graph manager: which steps are replayed, and when a graph is recorded.

At batch 1 a small model's step is hundreds of kernels of a few microseconds, and launching them takes longer than
running them. A graph launches all of them at once.

    step of decodes ── bucket ──┬── none is large enough ───────────────▶ eager
                                ├── recorded ── fill buffers, replay ───▶ residual
                                └── not yet ─── met the 32nd time? ─────▶ record, then as above
                                                      no ──────────────▶ eager

When recording happens: a few buckets at boot (`Buckets.at_start`), before the first request; any other when a load has
met it MEETINGS_BEFORE_RECORDING times. A recording takes some eager steps and the capture itself, for which
whoever runs just then waits. So it is done once it will pay, it is never repeated, and each one is counted and logged
with its seconds and bytes. One that fails (memory, or an operation that cannot be recorded) leaves
its bucket eager for good and harms no request; beyond the budget nothing is recorded any more.

No `torch.compile`: it would compile at every cold start, and a pod is to be Ready in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millstream_runtime.engine.execution.buckets import Bucket, Buckets
from millstream_runtime.engine.execution.recorders import Recorder
from millstream_runtime.engine.execution.static_decode import StaticDecode
from millstream_runtime.engine.execution.step_input import StepInput
from millstream_runtime.logs import log

MEETINGS_BEFORE_RECORDING = 32
FillTokens = Callable[[Tensor], None]


def leave_tokens(token_ids: Tensor) -> None:
    """All tokens of a step came from the host."""


@dataclass(frozen=True, slots=True)
class GraphUse:
    """What graphs were recorded, what that took, and which steps they served."""

    num_graphs: int = 0
    num_refused: int = 0  # buckets that could not be recorded
    seconds: float = 0.0  # of all recordings
    num_bytes: int = 0  # of device memory
    replayed_steps: int = 0
    eager_steps: int = 0  # of decodes only, for want of a bucket or of its graph

    @property
    def num_tried(self) -> int:
        """Recordings, good or bad."""
        return self.num_graphs + self.num_refused


class GraphedDecodes:
    """Serves steps of decodes by replaying graphs, as far as there are any."""

    def __init__(
        self,
        decode: StaticDecode,
        buckets: Buckets,
        recorder: Recorder,
        block_size_tokens: int,
        budget_bytes: int | None = None,
    ) -> None:
        """`budget_bytes`: once graphs have taken so much, no more are recorded; None is no bound."""
        self._decode = decode
        self._buckets = buckets
        self._recorder = recorder
        self._block_size_tokens = block_size_tokens
        self._budget_bytes = budget_bytes
        self._replays: dict[Bucket, Callable[[], None]] = {}
        self._refused: set[Bucket] = set()
        self._meetings: Counter[Bucket] = Counter()
        self.use = GraphUse()

    @torch.inference_mode()
    def record_first(self) -> GraphUse:
        """Record what is worth it before the first request; see `Buckets.at_start`."""
        for bucket in self._buckets.at_start():
            self._record(bucket)
        return self.use

    def residual(self, step: StepInput, fill: FillTokens = leave_tokens) -> Tensor | None:
        """The residual stream `[T, hidden]` of a step, a view until the next; None where the step is to run eagerly.

        `fill`: see `Forward.residual`.
        """
        if step.chunks[-1].num_tokens > 1:
            return None
        longest = max(chunk.context_len for chunk in step.chunks)
        contiguous = all(chunk.is_contiguous for chunk in step.chunks)
        width_blocks = -(-longest // self._block_size_tokens)
        bucket = self._buckets.holding(len(step.chunks), width_blocks, contiguous=contiguous)
        replay = None if bucket is None else self._replay_of(bucket)
        if bucket is None or replay is None:
            self.use = replace(self.use, eager_steps=self.use.eager_steps + 1)
            return None
        fill(self._decode.fill(bucket, step).token_ids)
        replay()
        self.use = replace(self.use, replayed_steps=self.use.replayed_steps + 1)
        return self._decode.residual(len(step.chunks))

    def _replay_of(self, bucket: Bucket) -> Callable[[], None] | None:
        if bucket not in self._replays and bucket not in self._refused:
            self._meetings[bucket] += 1
            if self._meetings[bucket] >= MEETINGS_BEFORE_RECORDING and self._may_record():
                self._record(bucket)
        return self._replays.get(bucket)

    def _may_record(self) -> bool:
        return self._budget_bytes is None or self.use.num_bytes < self._budget_bytes

    def _record(self, bucket: Bucket) -> None:
        """Record a step of padding: warming up computes it for real, and it must write into no request's blocks."""
        self._decode.fill_with_padding(bucket)
        try:
            recorded = self._recorder.record(lambda: self._decode.compute(bucket))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            self._refused.add(bucket)
            self.use = replace(self.use, num_refused=self.use.num_refused + 1)
            log.warning("graph_refused", **bucket._asdict(), error=type(error).__name__)
            return
        self._replays[bucket] = recorded.replay
        self.use = replace(
            self.use,
            num_graphs=self.use.num_graphs + 1,
            seconds=self.use.seconds + recorded.seconds,
            num_bytes=self.use.num_bytes + recorded.num_bytes,
        )
        log.info("graph_recorded", **bucket._asdict(), seconds=round(recorded.seconds, 4), bytes=recorded.num_bytes)
