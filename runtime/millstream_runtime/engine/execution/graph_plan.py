"""Which buckets are recorded at boot, and which step is replayed from one: decided by rank 0 alone. No torch.

All recordings happen before the first request, in the order of `Buckets.to_record`, until they have taken their budget
of memory or RECORDING_SECONDS. A recording under traffic would halt every running request for 30 to 80 ms. What is not
recorded is eager for good: too large for the memory (`graph_budget`), beyond the budget, or refused because it cannot
be recorded. How many of each is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from millstream_runtime.engine.execution.buckets import Bucket, Buckets
from millstream_runtime.engine.execution.step_input import ChunkInput
from millstream_runtime.logs import log

RECORDING_SECONDS = 10.0  # of a boot: a bucket takes 30 to 80 ms on an H200, and there are up to 250
BUCKETS_PER_MESSAGE = 16  # of the boot's progress


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
            on_progress: is told how far it is, for people.
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
