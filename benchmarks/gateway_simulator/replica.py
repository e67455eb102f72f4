"""One replica: continuous batching with chunked prefill, a KV cache with a prefix cache, and what its `/load` says.

A step takes `step_seconds` + a time per prompt token + a time per decoding request. While no prompt is computed, steps
are all alike until an answer ends or a request comes, and are simulated at once:

    |  step: 900 prompt tokens, 3 decodes  |s|s|s|s|s|s|s|  step: …      `s`: decode steps, one phase
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from benchmarks.gateway_simulator.trace import Turn
from millstream_gateway.replica_report import SERVING_PHASE, Answer, ReplicaReport, id_hash

BLOCK_TOKENS = 16
SHARED = -1  # the stream of the system prompt that all conversations begin with
RATE_KEPT_SHARE = 0.95  # of the sums that the prefill rate is made of, per step


@dataclass(frozen=True, slots=True)
class Speed:
    """What steps take, and what a step and the cache hold. By default as a model of 8 B parameters on one GPU."""

    step_seconds: float = 0.008
    prompt_token_seconds: float = 1 / 9000
    decode_seconds: float = 0.00025
    step_tokens: int = 2048
    max_num_seqs: int = 32
    cache_tokens: int = 160_000

    def of_step(self, prompt_tokens: int, num_decodes: int) -> float:
        """Return the seconds of one step."""
        return self.step_seconds + prompt_tokens * self.prompt_token_seconds + num_decodes * self.decode_seconds


@dataclass(slots=True)
class Job:
    """A request at a replica."""

    turn: Turn
    arrived_at_seconds: float
    cached_tokens: int = 0
    uncomputed_tokens: int = 0
    ttft_seconds: float = 0.0


class PrefixCache:
    """The tokens of each conversation that are in the KV cache: held by running requests, or left by ended ones.

    A conversation only grows, so what is cached of it is a number of tokens from its start. The least recently used is
    evicted first, from its end, as the engine does. A running request holds its whole length.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.held_tokens = 0  # by running requests, without the shared prompt
        self._lengths: OrderedDict[int, int] = OrderedDict()  # what is cached and not held, oldest first
        self._idle_tokens = 0
        self._held: dict[int, int] = {}

    def cached_tokens(self, turn: Turn) -> int:
        """Return how many of the prompt's tokens are there; the last one is always computed, for its logits."""
        shared = self._length(SHARED) if turn.shared_tokens else 0
        if shared < turn.shared_tokens:
            return shared
        own = turn.prompt_tokens - turn.shared_tokens
        return shared + min(self._length(turn.conversation), (own - 1) // BLOCK_TOKENS * BLOCK_TOKENS)

    def can_hold(self, turn: Turn) -> bool:
        """Whether prompt and answer fit, when all that nobody holds is evicted."""
        return self.held_tokens + turn.prompt_tokens + turn.answer_tokens <= self.capacity_tokens

    def hold(self, turn: Turn) -> None:
        """Take room for prompt and answer."""
        own = turn.prompt_tokens - turn.shared_tokens + turn.answer_tokens
        self._idle_tokens -= self._lengths.pop(turn.conversation, 0)
        self._held[turn.conversation] = own
        self.held_tokens += own
        if turn.shared_tokens:
            self._idle_tokens += turn.shared_tokens - self._lengths.pop(SHARED, 0)
            self._lengths[SHARED] = turn.shared_tokens
        self._evict()

    def release(self, turn: Turn) -> None:
        """Leave prompt and answer as what may be evicted."""
        own = self._held.pop(turn.conversation)
        self.held_tokens -= own
        self._lengths[turn.conversation] = own // BLOCK_TOKENS * BLOCK_TOKENS
        self._idle_tokens += self._lengths[turn.conversation]
        self._evict()

    def _length(self, stream: int) -> int:
        return self._lengths.get(stream, 0)

    def _evict(self) -> None:
        while (excess := self.held_tokens + self._idle_tokens - self.capacity_tokens) > 0 and self._lengths:
            stream, length = next(iter(self._lengths.items()))
            evicted = min(length, math.ceil(excess / BLOCK_TOKENS) * BLOCK_TOKENS)
            self._idle_tokens -= evicted
            if evicted == length:
                del self._lengths[stream]
            else:
                self._lengths[stream] = length - evicted


@dataclass(slots=True)
class _Phase:
    """Steps that are alike. `num_steps` is 1 where prompts are computed."""

    start_seconds: float
    step_seconds: float
    num_steps: int
    prompt_tokens: list[tuple[Job, int]] = field(default_factory=list)

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.num_steps * self.step_seconds


class SimulatedReplica:
    """A replica that is advanced from one change of its state to the next."""

    def __init__(self, endpoint: str, speed: Speed) -> None:
        self.endpoint = endpoint
        self.speed = speed
        self.cache = PrefixCache(speed.cache_tokens)
        self.busy_seconds = 0.0
        self.reports: list[tuple[float, ReplicaReport]] = []
        self.answers: list[tuple[float, Answer]] = []
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._decoding: list[tuple[int, int, Job]] = []  # heap by the decode step in which the answer ends
        self._decode_steps = 0
        self._num_jobs = 0
        self._phase: _Phase | None = None
        self._prefilled_tokens, self._prefill_seconds = 0.0, 0.0
        self._itl_seconds: float | None = None
        self._record(0.0)

    @property
    def next_seconds(self) -> float:
        """Return when its state changes next, if nothing arrives."""
        return self._phase.end_seconds if self._phase is not None else math.inf

    @property
    def num_requests(self) -> int:
        """Return how many it has."""
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    def submit(self, turn: Turn, now_seconds: float) -> Job:
        """Let a request arrive."""
        job = Job(turn, now_seconds)
        job.uncomputed_tokens = turn.prompt_tokens - self.cache.cached_tokens(turn)
        self._waiting.append(job)
        if self._phase is None:
            self._begin(now_seconds)
        elif not self._phase.prompt_tokens:  # the decode step that is running ends first
            steps = math.ceil((now_seconds - self._phase.start_seconds) / self._phase.step_seconds)
            self._phase.num_steps = min(self._phase.num_steps, max(1, steps))
        self._record(now_seconds)
        return job

    def finish_phase(self) -> list[Job]:
        """Go to `next_seconds`; return the jobs that were answered."""
        phase = self._phase
        assert phase is not None
        now_seconds = phase.end_seconds
        self.busy_seconds += now_seconds - phase.start_seconds
        self._observe(phase)
        if self._decoding:
            self._decode_steps += phase.num_steps
        for job, tokens in phase.prompt_tokens:
            job.uncomputed_tokens -= tokens
        for job in [one for one in self._prefilling if not one.uncomputed_tokens]:
            self._prefilling.remove(job)
            job.ttft_seconds = now_seconds - job.arrived_at_seconds
            self._num_jobs += 1
            heapq.heappush(self._decoding, (self._decode_steps + job.turn.answer_tokens - 1, self._num_jobs, job))
        ended = []
        while self._decoding and self._decoding[0][0] <= self._decode_steps:
            ended.append(self._end(heapq.heappop(self._decoding)[2], now_seconds))
        self._phase = None
        self._begin(now_seconds)
        self._record(now_seconds)
        return ended

    def ttft_seconds(self, turn: Turn, now_seconds: float) -> float:
        """Return when a request that came now would have its first token, by the true cache, queue and speed.

        Answers that end in the meantime are left out, and so is a wait for KV blocks.
        """
        seconds = now_seconds
        queue = [job.uncomputed_tokens for job in (*self._prefilling, *self._waiting)]
        if self._phase is not None:
            if self._phase.prompt_tokens:
                seconds = self._phase.end_seconds
                queue = [tokens for tokens in self._after_phase(self._phase) if tokens]
            else:
                rest = (now_seconds - self._phase.start_seconds) % self._phase.step_seconds
                seconds += self._phase.step_seconds - rest
        queue.append(turn.prompt_tokens - self.cache.cached_tokens(turn))
        num_decodes = len(self._decoding)
        while queue:
            budget = max(1, self.speed.step_tokens - num_decodes)
            computed = 0
            while queue and computed < budget:
                part = min(queue[0], budget - computed)
                computed += part
                queue[0] -= part
                if not queue[0]:
                    del queue[0]
            seconds += self.speed.of_step(computed, num_decodes)
        return seconds - now_seconds

    def _after_phase(self, phase: _Phase) -> list[int]:
        computed = {id(job): tokens for job, tokens in phase.prompt_tokens}
        jobs = (*self._prefilling, *self._waiting)
        return [job.uncomputed_tokens - computed.get(id(job), 0) for job in jobs]

    def _begin(self, now_seconds: float) -> None:
        while self._waiting and len(self._prefilling) + len(self._decoding) < self.speed.max_num_seqs:
            job = self._waiting[0]
            if not self.cache.can_hold(job.turn):
                break
            self._waiting.popleft()
            job.cached_tokens = self.cache.cached_tokens(job.turn)
            job.uncomputed_tokens = job.turn.prompt_tokens - job.cached_tokens
            self.cache.hold(job.turn)
            self._prefilling.append(job)
        budget = max(1, self.speed.step_tokens - len(self._decoding))
        parts: list[tuple[Job, int]] = []
        for job in self._prefilling:
            if budget:
                parts.append((job, min(job.uncomputed_tokens, budget)))
                budget -= parts[-1][1]
        num_decodes = len(self._decoding)
        if parts:
            seconds = self.speed.of_step(sum(tokens for _, tokens in parts), num_decodes)
            self._phase = _Phase(now_seconds, seconds, 1, parts)
        elif num_decodes:
            steps = max(1, self._decoding[0][0] - self._decode_steps)
            self._phase = _Phase(now_seconds, self.speed.of_step(0, num_decodes), steps)

    def _end(self, job: Job, now_seconds: float) -> Job:
        turn = job.turn
        self.cache.release(turn)
        answer = Answer(id_hash(turn.request.request_id), turn.prompt_tokens, job.cached_tokens, turn.answer_tokens)
        self.answers.append((now_seconds, answer))
        return job

    def _observe(self, phase: _Phase) -> None:
        if phase.prompt_tokens:
            tokens = sum(tokens for _, tokens in phase.prompt_tokens)
            self._prefilled_tokens = self._prefilled_tokens * RATE_KEPT_SHARE + tokens
            self._prefill_seconds = self._prefill_seconds * RATE_KEPT_SHARE + phase.step_seconds
        if self._decoding:
            kept = 0.98**phase.num_steps
            before = phase.step_seconds if self._itl_seconds is None else self._itl_seconds
            self._itl_seconds = kept * before + (1 - kept) * phase.step_seconds

    def _record(self, now_seconds: float) -> None:
        running = len(self._prefilling) + len(self._decoding)
        queue = (*self._prefilling, *self._waiting)
        total_blocks = self.cache.capacity_tokens // BLOCK_TOKENS
        report = ReplicaReport(
            "boot",
            SERVING_PHASE,
            len(self._waiting),
            running,
            sum(job.uncomputed_tokens for job in queue),
            self.cache.held_tokens,
            max(0, total_blocks - self.cache.held_tokens // BLOCK_TOKENS),
            total_blocks,
            BLOCK_TOKENS,
            self._prefilled_tokens / self._prefill_seconds if self._prefill_seconds else self._warm_up_rate(),
            self._itl_seconds or self.speed.of_step(0, 1),
        )
        self.reports.append((now_seconds, report))

    def _warm_up_rate(self) -> float:
        return self.speed.step_tokens / self.speed.of_step(self.speed.step_tokens, 0)
