"""Clients of a scheduler without a model, in simulated time: a step is the unit, and every sampled token is 1."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from millstream_runtime.engine.request import Request, SamplingParams
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence

BLOCK_TOKENS = 16


class SimulatedEngine:
    """A scheduler with its pool. `waits`: by client, steps from arrival to first token."""

    def __init__(
        self,
        rows: int,
        budget_tokens: int,
        *,
        num_blocks: int = 4096,
        caches: bool = True,
    ) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK_TOKENS, rows, enable_prefix_caching=caches, has_regions=False)
        self.scheduler = Scheduler(self.blocks, budget_tokens, rows)
        self.now_steps = 0
        self.num_chunks = 0  # in all steps: how well the rows were used
        self.computed = Counter[str]()  # tokens by client, those that are computed again included
        self.waits: dict[str, list[int]] = {}
        self.num_left = Counter[str]()  # requests that have not ended, by client
        self._arrived_at: dict[Sequence, int] = {}
        self._num_arrivals = 0

    def add(
        self,
        client: str,
        prompt: list[int],
        answer_tokens: int,
        *,
        priority: int = 0,
        queue_of: str | None = None,
        ranks_above: bool = False,
    ) -> Sequence:
        """`queue_of`: the client that the scheduler sees, where it is another one."""
        request = Request(
            f"{client}-{self._num_arrivals}",
            prompt,
            SamplingParams(answer_tokens),
            priority=priority,
            client=client if queue_of is None else queue_of,
            client_ranks_above=ranks_above,
        )
        sequence = Sequence(request, self._num_arrivals, 0, [*prompt], len(prompt))
        self._num_arrivals += 1
        self._arrived_at[sequence] = self.now_steps
        self.num_left[client] += 1
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.num_left[_client(sequence)] -= 1

    def step(self) -> None:
        """Compute a step, or be idle for as long."""
        if not self.scheduler.has_work:
            self.now_steps += 1
            return
        chunks = self.scheduler.apply(self.scheduler.plan())
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        self.scheduler.advance(chunks)
        self.now_steps += 1
        self.num_chunks += len(chunks)
        for sequence, num_tokens in chunks:
            self.computed[_client(sequence)] += num_tokens
        for sequence in sampling:
            sequence.append(1)
            if sequence.num_generated_tokens == 1:
                waited = self.now_steps - self._arrived_at[sequence]
                self.waits.setdefault(_client(sequence), []).append(waited)
            if sequence.num_generated_tokens == sequence.request.sampling.max_tokens:
                self.cancel(sequence)


def _client(sequence: Sequence) -> str:
    return sequence.request.request_id.partition("-")[0]


@dataclass
class Bursts:
    """A client that sends several requests at once, again and again."""

    client: str
    size: int
    period_steps: int
    answer_tokens: tuple[int, int]
    prompt_tokens: tuple[int, int] = (8, 40)
    priority: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def arrive(self, engine: SimulatedEngine, queue_of: str | None = None) -> None:
        if engine.now_steps % self.period_steps:
            return
        for _ in range(self.size):
            prompt = [self.rng.randrange(1000) for _ in range(self.rng.randint(*self.prompt_tokens))]
            answer = self.rng.randint(*self.answer_tokens)
            engine.add(self.client, prompt, answer, priority=self.priority, queue_of=queue_of)


@dataclass
class Flood:
    """A client that always has `backlog` requests in the server."""

    client: str
    backlog: int
    make: Callable[[random.Random], tuple[list[int], int]]  # a prompt, and the tokens of its answer
    priority: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(2))

    def arrive(self, engine: SimulatedEngine, queue_of: str | None = None) -> None:
        while engine.num_left[self.client] < self.backlog:
            prompt, answer = self.make(self.rng)
            engine.add(self.client, prompt, answer, priority=self.priority, queue_of=queue_of)


def p95(waits: list[int]) -> int:
    """The wait that 95 of 100 requests do not exceed."""
    return sorted(waits)[math.ceil(0.95 * len(waits)) - 1]
