"""The engine: load once, then `add_request`, `step`, `step`, ... One thread calls it; nothing here waits or sleeps.

    add_request -> Scheduler.plan -> Scheduler.apply -> ModelRunner.launch -> read -> accept tokens -> TokenOutput

A step is read as soon as it is launched. Where steps overlap (see `overlap`), it is read after the next is launched.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from millstream_runtime.config import GovernorMode, RuntimeConfig
from millstream_runtime.distributed.topology import Topology
from millstream_runtime.engine.accepting import Accepting
from millstream_runtime.engine.assembly import engine_stats, make_blocks, make_drafting, make_runner
from millstream_runtime.engine.device_policy import ThreadCounts
from millstream_runtime.engine.ending import Ending
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.graphs.graphed_decodes import GraphUse
from millstream_runtime.engine.execution.model_loading import load_on_ranks
from millstream_runtime.engine.execution.overlap import StepInFlight, reasons_to_wait
from millstream_runtime.engine.execution.rank_group import RankGroup, start_rank_group
from millstream_runtime.engine.kernel_backends import KernelChoice, LinearChoice
from millstream_runtime.engine.kv.pool_size import MemoryUse
from millstream_runtime.engine.out_of_memory import is_out_of_memory
from millstream_runtime.engine.prefill_rate import PrefillRate
from millstream_runtime.engine.request import EngineStats, FinishReason, Request, RequestError, TokenOutput
from millstream_runtime.engine.sampling.logits_processors import LogitsProcessor
from millstream_runtime.engine.sampling.token_counts import TokenCounts
from millstream_runtime.engine.sampling.validation import check_request
from millstream_runtime.engine.scheduling.decode_times import growth_of
from millstream_runtime.engine.scheduling.pacing import Pace, pace_for
from millstream_runtime.engine.scheduling.scheduler import Scheduler
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.scheduling.step_plan import Chunk, StepPlan, tokens_alone
from millstream_runtime.engine.speculation.drafter import Drafter
from millstream_runtime.engine.speculation.length_choice import crowd_of
from millstream_runtime.engine.step_times import StepTimer, TimedStep, prompts_of, seconds_of_decodes
from millstream_runtime.engine.warm_up import WarmUp
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.logs import log
from millstream_runtime.models.config.model_config import ModelConfig


class Engine:
    """A model with its KV pool, serving many requests at once.

    Attributes:
        model_config: the model's shape; `max_model_len` and `eos_token_ids` as this engine applies them.
        kernels: which parts of the model Triton kernels compute, and why.
        linears: by which arithmetic quantized layers are computed, and why.
        kernel_lookups: variants that were looked up among those compiled ahead, by result; empty where none was.
        memory_use: bytes that weights and pool take on this device, as far as measured.
        step_times: steps that the warm-up timed; empty before it.
        processors_for: makes the logits processors of a request; none by default.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        on_phase: Callable[[str, str], None],
        *,
        rank_group: RankGroup | None = None,
        on_read: Callable[[int, int], None] | None = None,
        execution: Execution | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """Load the model and size the KV pool; `warm_up` comes after.

        Args:
            on_phase: `on_phase(phase, message)` is called when a phase of loading begins.
            rank_group: ranks that are running already; by default the engine starts its own.
            on_read: `on_read(done_bytes, total_bytes)` is called after each tensor of the checkpoint.
            execution: how steps are executed; by default as `execution_mode` says.
            drafter: what proposes tokens for steps to check; by default as `config.speculation_method` says.

        Raises:
            RuntimeFailure: CheckpointInvalid, UnsupportedByRuntime, OutOfMemory, InvalidConfig or NCCLFailed.
        """
        self._on_phase = on_phase
        on_phase("LoadingWeights", f"Reading {config.model}.")
        self._rank_group = rank_group if rank_group is not None else start_rank_group(config)
        try:
            loaded = load_on_ranks(config, self._rank_group, on_phase, on_read, execution)
        except BaseException:
            self._rank_group.close()
            raise
        self.memory_use: MemoryUse = loaded.memory_use
        self.kernels: tuple[KernelChoice, ...] = loaded.kernels
        self.kernel_lookups: Mapping[str, int] = loaded.kernel_lookups
        self.linears: tuple[LinearChoice, ...] = loaded.linears
        self.model_config: ModelConfig = replace(
            loaded.shard_config.model_config, max_model_len=loaded.pool.max_model_len
        )
        self._ending = Ending(self.model_config.max_model_len, self.model_config.eos_token_ids)
        self._max_num_seqs, self._max_step_tokens = config.max_num_seqs, config.max_num_batched_tokens
        num_ranks = self._rank_group.ranks.size
        self._blocks = make_blocks(config, loaded, self.model_config, num_ranks)
        self._scheduler = Scheduler(self._blocks, config.max_num_batched_tokens, config.max_num_seqs)
        self._runner = make_runner(config, loaded, self.model_config, self._rank_group)
        self._drafting = make_drafting(
            config,
            drafter,
            loaded,
            self.model_config,
            self._ending,
            lambda sequence, num_tokens: self._scheduler.make_room(sequence, num_tokens),
        )
        self._sequences: dict[str, Sequence] = {}
        self._accepting = Accepting(
            self._sequences,
            self._scheduler,
            self._blocks,
            self._runner,
            self._ending,
            self._drafting,
            config.tree,
        )
        self._policy, self._overlaps = loaded.shard_config.policy, loaded.execution.overlapped
        self._first_target = config.target_itl_milliseconds
        self._pace: Pace | None = None  # `max_num_batched_tokens` alone bounds the prompts of a step
        self.set_target_itl(None)
        self._prefill_rate = PrefillRate()
        self._crowd = crowd_of(config.max_num_seqs)
        self._in_flight: StepInFlight | None = None
        self._read_at_seconds = self._drafting_seconds = 0.0  # by the step clock
        self.step_clock: Callable[[], float] = time.perf_counter  # measures the pace
        self._num_arrivals = 0
        self._steps_total = 0
        self._is_warming_up = False
        self._last_step_tokens = 0
        self.step_times: tuple[TimedStep, ...] = ()
        self.processors_for: Callable[[Request], tuple[LogitsProcessor, ...]] = lambda request: ()

    def set_target_itl(self, milliseconds: int | None) -> None:
        """Bound the time by which a step with prompts makes running answers wait. None: as the engine began."""
        asked = milliseconds if milliseconds is not None else self._first_target
        self._pace = pace_for(asked, self._policy.default_target_itl_milliseconds, self._pace, self.model_config)

    def set_speculation_governor(self, mode: GovernorMode) -> None:
        """Whether measured gains decide how many drafts are checked, from the next step on."""
        if self._drafting is not None:
            self._drafting.lengths.mode = mode

    @property
    def target_itl_milliseconds(self) -> int | None:
        """The bound that holds now; None: `max_num_batched_tokens` alone bounds the prompts of a step."""
        return None if self._pace is None else round(1000 * self._pace.target_itl_seconds)

    @property
    def topology(self) -> Topology | None:
        """How the ranks are connected; None for a single rank."""
        return self._rank_group.topology

    @property
    def threads(self) -> ThreadCounts:
        """Threads of this process that compute a step, by its size."""
        return self._policy.threads

    @property
    def graphs(self) -> GraphUse | None:
        """CUDA graphs that were recorded and replayed so far; None where every step is eager."""
        return self._runner.graphs

    def when_lost(self, on_lost: Callable[[RuntimeFailure], None]) -> None:
        """Call `on_lost`, in any thread, when a rank is gone: an idle engine has no step to raise it from, and a step
        may be stuck on the device."""
        self._rank_group.on_lost = on_lost

    def close(self) -> None:
        """End the other ranks. They also end when this process does."""
        self._rank_group.close()

    def add_request(self, request: Request) -> None:
        """Queue a request; its first token comes from a later `step`.

        Raises:
            ValueError: an id in use, an empty or too long prompt, an id outside the vocabulary, no token to sample.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is already running")
        check_request(request, self.model_config)
        prompt = list(request.prompt_token_ids)
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(64)
        sequence = Sequence(
            request, self._num_arrivals, seed, prompt, len(prompt), processors=self.processors_for(request)
        )
        sequence.kv_variant = self._runner.kv_variant(len(prompt))
        self._num_arrivals += 1
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request; no output follows. Unknown or finished ids are no error.

        Its KV blocks are freed now, or once the step in flight that writes to them is read.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._accepting.end(sequence)

    def has_work(self) -> bool:
        """Whether `step` has anything to compute, or a lost rank to raise."""
        return self._scheduler.has_work or self._rank_group.is_lost

    def step(self) -> list[TokenOutput]:
        """Compute one step for all requests that fit in it: one new token per request, and one more per accepted draft.

        Raises:
            RuntimeFailure: NCCLFailed, or what a rank failed with; the engine cannot be used after it.
        """
        self._rank_group.check()
        outputs: list[TokenOutput] = []
        if self._in_flight is not None and self._must_read_first(self._in_flight):
            outputs += self._read()
        plan = self._plan()
        if plan.preempted and self._in_flight is not None:  # a step in flight may write to the blocks
            outputs += self._read()
            plan = self._plan()
        now = time.monotonic()
        for sequence in plan.admitted:
            if sequence.scheduled_at_seconds is None:
                sequence.scheduled_at_seconds = now
        launched, failed = None, False
        try:
            launched = self._launch(self._scheduler.apply(plan))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or self._is_warming_up or self._rank_group.ranks.size > 1:
                raise
            failed = True  # handled below, where the error holds no tensors any more
        if self._in_flight is not None:
            outputs += self._read()
        if failed:
            return [*outputs, *self._after_out_of_memory(plan)]
        self._in_flight = launched
        if launched is not None and not self._overlaps:
            outputs += self._read()
        return outputs

    def _after_out_of_memory(self, plan: StepPlan) -> list[TokenOutput]:
        """End the largest prompt of a step for which there was no memory; the others are computed again. A step with
        drafts is computed again without them.

        Ranks that wait for each other cannot do this.
        """
        sizes = plan.chunks
        self._runner.forget_step(TokenCounts(self._max_num_seqs, self._runner.device))
        self._policy.free_cached_memory()
        left = [one for one in sizes if not one.has_ended]
        largest = max(left, key=lambda one: (sizes[one], len(one.token_ids), one.arrival), default=None)
        self._scheduler.roll_back(plan)
        log.warning("step_out_of_memory", num_sequences=len(sizes), num_tokens=sum(sizes.values()))
        if self._drafting is not None and plan.drafts:
            self._drafting.wait()
            return []
        if largest is None:
            return []
        self._accepting.end(largest)
        return [TokenOutput(largest.request.request_id, None, FinishReason.ERROR, error=RequestError.OUT_OF_MEMORY)]

    def _must_read_first(self, step: StepInFlight) -> bool:
        sampled = ((one, self._runner.must_recompute(one)) for one in step.launched.sampling)
        drafts = self._drafting is not None and self._drafting.needs_last_tokens
        return bool(reasons_to_wait(sampled, drafts=drafts))

    def _plan(self) -> StepPlan:
        """Plan the next step."""
        budget_of = tokens_alone if self._pace is None else self._pace.budget
        if self._drafting is None:
            return self._scheduler.plan(budget_of)
        began = self.step_clock()
        is_crowded = self._scheduler.num_waiting >= self._crowd
        running = self._scheduler.running
        num_entering = min(self._scheduler.num_waiting, self._max_num_seqs - len(running))
        proposed = self._drafting.propose(running, is_crowded=is_crowded, num_entering=num_entering)
        self._drafting_seconds = self.step_clock() - began
        plan = self._scheduler.plan(budget_of, proposed)
        self._drafting.left_out(proposed, plan.drafts)
        return plan

    def _launch(self, chunks: list[Chunk]) -> StepInFlight | None:
        """Give the device a step. From here on its tokens count as computed, and those it samples as known."""
        if not chunks:
            return None
        for sequence, _ in chunks:
            sequence.steps_in_flight += 1
        shape = None if self._pace is None else self._pace.step_time(chunks)
        began = self.step_clock()
        span = None if shape is None else self._policy.begin_span()
        try:
            with self._rank_group.computing():
                launched = self._runner.launch(chunks)
        except BaseException:
            for sequence, _ in chunks:
                sequence.steps_in_flight -= 1
            raise
        if span is not None:
            span.end()
        prompt_tokens = self._count_as_computed(chunks)
        for sequence in launched.sampling:
            sequence.expect()
            sequence.is_complete = self._ending.is_at_length(sequence, len(sequence.token_ids))
        return StepInFlight(launched, chunks, prompt_tokens, shape, began, span)

    def _count_as_computed(self, chunks: list[Chunk]) -> int:
        """Return how many tokens of users' prompts the step computes."""
        self._scheduler.advance(chunks)
        self._steps_total += 1
        self._last_step_tokens = sum(n for one, n in chunks if not one.request.is_heartbeat)
        if self._last_step_tokens == len(chunks):  # most steps: a token for each decode
            return 0
        return sum(n for one, n in chunks if n > 1 and not one.draft_ids and not one.request.is_heartbeat)

    def _read(self) -> list[TokenOutput]:
        """Wait for the step in flight, and learn what it took."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        with self._rank_group.computing():
            sampled = step.launched.read()
        now = self.step_clock()
        decodes = None if self._drafting is None else self._drafting.decodes_of(step.chunks)
        if step.prompt_tokens or step.shape is not None:
            if step.span is not None:
                seconds = step.span.seconds()
            else:  # the device began with it when it was launched, or when it was done with the step before
                seconds = now - max(step.began_at_seconds, self._read_at_seconds)
            if step.prompt_tokens:
                self._prefill_rate.observe(step.prompt_tokens, seconds)
            if step.shape is not None and self._pace is not None:
                self._pace.observe(replace(step.shape, seconds=seconds))
        self._read_at_seconds = now
        outputs = self._accepting.accept(step, sampled)
        if self._drafting is not None:
            seconds = now - step.began_at_seconds
            self._drafting.observe_step(decodes, len(outputs), seconds, self._drafting_seconds)
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot; call it between steps."""
        return engine_stats(
            len(self._sequences),
            self._scheduler,
            self._blocks,
            self._drafting,
            self._pace,
            self._prefill_rate,
            steps_total=self._steps_total,
            last_step_tokens=self._last_step_tokens,
        )

    def warm_up(self) -> None:
        """Run the first steps, so that no request pays for first-time work: see `warm_up.WarmUp`.

        Raises:
            RuntimeFailure: CheckpointInvalid, where the first answer is not a number.
        """
        self._on_phase("WarmingUp", "Running the first steps.")
        self._is_warming_up = True
        warm_up = WarmUp(self, self._max_requests, self.model_config.max_model_len, self._max_step_tokens)
        warm_up.run(self._policy, is_only_rank=self._rank_group.ranks.size == 1)
        if self._drafting is not None:
            self._drafting.warm_up(warm_up.run_drafts())
        self._time_steps()
        self._is_warming_up = False
        if self._pace is not None:
            # First steps are slow, and may have had other numbers of threads.
            self._pace.reset(growth_of(seconds_of_decodes(self.step_times)))
        self.check_integrity()

    def _time_steps(self) -> None:
        on_cpu, vocab_size = self._policy.is_synchronous, self.model_config.vocab_size
        self.step_times = StepTimer(self, self._max_requests, vocab_size, on_cpu=on_cpu).run(self._max_step_tokens)
        for step in prompts_of(self.step_times):
            self._prefill_rate.observe(step.new_tokens, step.step_microseconds / 1e6)

    def _max_requests(self, num_tokens: int) -> int:
        """How many requests of `num_tokens`, prompt included, run at once; 0 if longer than the engine allows."""
        if num_tokens > self.model_config.max_model_len:
            return 0
        return min(self._max_num_seqs, self._blocks.num_blocks // self._blocks.most_held_blocks(num_tokens))

    def check_integrity(self) -> None:
        """Check that every KV block is free or held by running requests, that no request is lost, and the counts.

        Raises:
            RuntimeError: names what leaked, or was counted wrong.
        """
        self._blocks.check_integrity(self._scheduler.running)
        self._scheduler.check_counts()
        running = sum(not one.has_ended for one in self._scheduler.running)
        unscheduled = len(self._sequences) - running - self._scheduler.num_waiting
        if unscheduled:
            raise RuntimeError(f"{unscheduled} requests are known to the engine but not to its scheduler.")
