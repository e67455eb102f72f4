"""The engine: load once, then `add_request`, `step`, `step`, ... One thread calls it; nothing here waits or sleeps.

add_request -> Scheduler.plan, carry_out -> ModelRunner.launch -> read -> finish or go on -> TokenOutput

A step is read as soon as it is launched. Where steps overlap (see `overlap`), it is read after the next is launched.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.distributed.topology import Topology
from millstream_runtime.engine.cpu import threads
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.graphs import GraphUse
from millstream_runtime.engine.execution.last_tokens import LastTokens
from millstream_runtime.engine.execution.model_runner import ModelRunner, Sampled
from millstream_runtime.engine.execution.overlap import StepInFlight, reasons_to_wait
from millstream_runtime.engine.execution.rank_group import RankGroup, assemble, start_rank_group
from millstream_runtime.engine.kv.pool_size import MemoryUse
from millstream_runtime.engine.request import EngineStats, FinishReason, Prefill, Request, TokenOutput
from millstream_runtime.engine.sampling.logits_processors import LogitsProcessor
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.chunked_prefill import PromptShare
from millstream_runtime.engine.scheduling.layered_prefill import ChunkSlice
from millstream_runtime.engine.scheduling.scheduler import Chunk, Scheduler, StepPlan
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.warm_up import WarmUp
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.models.config.model_config import ModelConfig


class Engine:
    """A model with its KV pool, serving many requests at once.

    Attributes:
        model_config: the model's shape; `max_model_len` and `eos_token_ids` as this engine applies them.
        memory_use: what weights and pool took on this device, as far as it was measured.
        processors_for: makes the logits processors of a request; by default there are none.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        on_phase: Callable[[str, str], None],
        *,
        rank_group: RankGroup | None = None,
        on_read: Callable[[int, int], None] | None = None,
        execution: Execution | None = None,
    ) -> None:
        """Load the model and size the pool. `on_phase(phase, message)` tells where it is; `warm_up` comes after.

        Args:
            rank_group: ranks that are running already; the engine starts its own where there are none.
            on_read: `on_read(done_bytes, total_bytes)` tells how much of the checkpoint is read, tensor by tensor.
            execution: how steps are carried out, where it is not what the device is best served with.

        Raises:
            RuntimeFailure: CheckpointInvalid, UnsupportedByRuntime, OutOfMemory, InvalidConfig or NCCLFailed, in one
                sentence.
        """
        self._on_phase = on_phase
        on_phase("LoadingWeights", f"Reading {config.model}.")
        self._rank_group = rank_group if rank_group is not None else start_rank_group(config)
        try:
            assembled = assemble(config, self._rank_group, on_phase, on_read, execution)
        except BaseException:
            self._rank_group.close()
            raise
        model_config, pool = assembled.placement.model_config, assembled.pool
        self.memory_use: MemoryUse = assembled.memory_use
        self.model_config: ModelConfig = replace(model_config, max_model_len=pool.max_model_len)
        self._blocks = BlockManager(
            pool.num_blocks,
            config.block_size_tokens,
            config.max_num_seqs,
            enable_prefix_caching=config.enable_prefix_caching,
            window_tokens=_window_of_all_layers(model_config),
        )
        self._scheduler = Scheduler(self._blocks, config.max_num_batched_tokens, config.max_num_seqs)
        self._overlaps = assembled.execution.overlapped
        last_tokens = LastTokens(config.max_num_seqs, assembled.forward.device) if self._overlaps else None
        self._runner = ModelRunner(
            assembled.forward, model_config.eos_token_ids, self._rank_group.broadcast, last_tokens
        )
        self._in_flight: StepInFlight | None = None
        self._read_at_seconds = 0.0  # by the step clock
        self._max_num_seqs = config.max_num_seqs
        self._prompts = PromptShare(model_config, config.block_size_tokens, self._runner)
        self.step_clock: Callable[[], float] = time.perf_counter  # what the pace is measured by
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = 0
        self._steps_total = 0
        self._last_step_tokens = 0
        self.processors_for: Callable[[Request], tuple[LogitsProcessor, ...]] = lambda request: ()

    @property
    def topology(self) -> Topology | None:
        """What connects the ranks; None where there is one."""
        return self._rank_group.topology

    @property
    def threads(self) -> threads.Threads:
        """How many threads of this process compute a step of each size."""
        return self._runner.threads

    @property
    def graphs(self) -> GraphUse | None:
        """What CUDA graphs were recorded and replayed so far; None where every step is eager."""
        return self._runner.graphs

    def when_lost(self, on_lost: Callable[[RuntimeFailure], None]) -> None:
        """Have `on_lost` called, by any thread, when a rank is gone: an idle engine has no step to raise it from, and a
        step may be stuck on the device."""
        self._rank_group.on_lost = on_lost

    def close(self) -> None:
        """End the side thread and the other ranks. They end by themselves with this process, however it ends."""
        self._runner.stop_beside()
        self._rank_group.close()

    def add_request(self, request: Request) -> None:
        """Queue a request; its first token comes from a later `step`.

        Raises:
            ValueError: an id in use, an empty or too long prompt, an id outside the vocabulary, no token asked for.
        """
        self._check_request(request)
        prompt = list(request.prompt_token_ids)
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(64)
        sequence = Sequence(request, self._arrivals, seed, prompt, len(prompt), processors=self.processors_for(request))
        sequence.kv_variant = self._runner.kv_variant(len(prompt))
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Forget a request; no output follows. Unknown or finished ids are no error.

        Its KV blocks are free now, or once the step in flight that writes to them is read.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence)

    def has_work(self) -> bool:
        """Whether `step` has anything to compute, or to tell: that a rank is lost."""
        return self._scheduler.has_work or self._rank_group.is_lost

    def step(self) -> list[TokenOutput]:
        """Compute one step for all requests that fit in it; at most one new token a request.

        Raises:
            RuntimeFailure: NCCLFailed, or whatever a rank failed with; the engine is of no use after it.
        """
        self._rank_group.check()
        outputs: list[TokenOutput] = []
        if self._in_flight is not None and self._must_read_first(self._in_flight):
            outputs += self._read()
        plan = self._plan()
        if plan.preempted and self._in_flight is not None:  # nobody gives up blocks that a step in flight writes to
            outputs += self._read()
            plan = self._plan()
        now = time.monotonic()
        for sequence in plan.admitted:
            if sequence.scheduled_at_seconds is None:
                sequence.scheduled_at_seconds = now
        launched = self._launch(*self._prompts.apply(plan, self._scheduler))
        if self._in_flight is not None:
            outputs += self._read()
        self._in_flight = launched
        if launched is not None and not self._overlaps:
            outputs += self._read()
        return outputs

    def _must_read_first(self, step: StepInFlight) -> bool:
        sampling = step.launched.sampling
        return bool(reasons_to_wait((one, self._runner.must_recompute(one)) for one in sampling))

    def _plan(self) -> StepPlan:
        """The next step's, with prompts bounded by how far the longest-reaching has come."""
        prompts = [one.num_computed_tokens for one in self._scheduler.running if one.num_uncomputed_tokens > 1]
        most_tokens = None
        if prompts or self._scheduler.num_waiting:
            most_tokens = self._prompts.most_tokens(max(prompts, default=0))
        return self._scheduler.plan(most_tokens, self._prompts.under_way)

    def _launch(self, chunks: list[Chunk], part: ChunkSlice | None) -> StepInFlight | None:
        """Give the device a step. From here on its tokens count as computed, and those it samples as known."""
        touched = [*chunks, *(part.chunks if part is not None else ())]
        if not touched:
            return None
        for sequence, _ in touched:
            sequence.steps_in_flight += 1
        began, shape, graphs = self.step_clock(), self._prompts.time_of(chunks, part), self.graphs
        slice_began: list[float] = []
        with self._rank_group.computing():
            launched = self._runner.launch(chunks, part, lambda: slice_began.append(self.step_clock()))
        if shape is not None and slice_began and self._runner.returns_when_done:
            shape = replace(shape, decode_seconds=slice_began[0] - began)
        recorded = graphs is not None and self.graphs is not None and self.graphs.num_tried > graphs.num_tried
        self._count_as_computed(chunks, part)
        for sequence in launched.sampling:
            sequence.expect()
            sequence.is_complete = self._is_at_length(sequence, len(sequence.token_ids))
        return StepInFlight(launched, touched, None if recorded else shape, began)

    def _count_as_computed(self, chunks: list[Chunk], part: ChunkSlice | None) -> None:
        sliced = part.chunks if part is not None and part.is_last else []
        self._scheduler.advance([*chunks, *sliced])
        self._scheduler.publish_prefix(sliced)
        self._steps_total += 1
        self._last_step_tokens = sum(n for one, n in [*chunks, *sliced] if not one.request.is_heartbeat)

    def _read(self) -> list[TokenOutput]:
        """Wait for the step in flight, and let its sequences go on or end."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        with self._rank_group.computing():
            sampled = step.launched.read()
        now = self.step_clock()
        # The device began with it when it was launched, or when it was done with the step before.
        if step.shape is not None:
            seconds = now - max(step.began_at_seconds, self._read_at_seconds)
            self._prompts.pace.observe(replace(step.shape, seconds=seconds))
        self._read_at_seconds = now
        for sequence, _ in step.chunks:
            sequence.steps_in_flight -= 1
        leaving = [one for one, _ in step.chunks if one.has_ended and not one.steps_in_flight]
        outputs = []
        for sequence, one in zip(step.launched.sampling, sampled, strict=True):
            if one.token_id is None:
                sequence.has_bad_numbers = True
                self._blocks.forget(sequence)
            if not sequence.has_ended:
                outputs.append(self._advance(sequence, one))
        for sequence in leaving:
            self._release(sequence)
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot; call it between steps."""
        return EngineStats(
            num_requests_running=len(self._sequences) - self._scheduler.num_waiting,
            num_requests_waiting=self._scheduler.num_waiting,
            kv_blocks_total=self._blocks.num_blocks,
            kv_blocks_used=self._blocks.num_blocks - self._blocks.num_free_blocks,
            block_size_tokens=self._blocks.block_size_tokens,
            num_preemptions_total=self._scheduler.num_preemptions_total,
            steps_total=self._steps_total,
            last_step_tokens=self._last_step_tokens,
            recomputed_tokens_total=self._scheduler.recomputed_tokens_total,
            prefix_cache_queried_tokens_total=self._scheduler.queried_tokens_total,
            prefix_cache_hit_tokens_total=self._scheduler.hit_tokens_total,
        )

    def warm_up(self) -> None:
        """Run steps of the shapes to come once, so that no request pays for first-time work: see `warm_up.WarmUp`.

        Raises:
            RuntimeFailure: CheckpointInvalid, where the first answer is not a number.
        """
        self._on_phase("WarmingUp", "Running the first steps.")
        warm_up = WarmUp(self, self._runner, self._room_for_requests_of, self.model_config.max_model_len)
        warm_up.run(alone=self._rank_group.ranks.size == 1)
        self._prompts.forget_times()  # which were of first steps, and on other numbers of threads
        self.check_integrity()

    def _room_for_requests_of(self, num_tokens: int) -> int:
        if num_tokens > self.model_config.max_model_len:
            return 0
        return min(self._max_num_seqs, self._blocks.num_blocks // self._blocks.blocks_for(num_tokens))

    def check_integrity(self) -> None:
        """Every KV block is free or held by exactly one running request.

        Raises:
            RuntimeError: naming what leaked.
        """
        self._blocks.check_integrity(self._scheduler.running)
        running = sum(not one.has_ended for one in self._scheduler.running)
        unscheduled = len(self._sequences) - running - self._scheduler.num_waiting
        if unscheduled:
            raise RuntimeError(f"{unscheduled} requests are known to the engine but not to its scheduler.")

    def _advance(self, sequence: Sequence, sampled: Sampled) -> TokenOutput:
        """Accept a sampled token and finish its sequence where it ends."""
        request_id, token_id = sequence.request.request_id, sampled.token_id
        if token_id is None:
            self._end(sequence)
            return TokenOutput(request_id, None, FinishReason.ABORT)
        prefill = _prefill(sequence) if sequence.num_read_tokens == sequence.num_prompt_tokens else None
        sequence.accept(token_id)
        reason = self._finish_reason(sequence, token_id)
        if reason is not None:
            self._end(sequence)
        elif not sequence.num_unread_tokens and self._runner.must_recompute(sequence):
            self._scheduler.recompute(sequence)
            sequence.kv_variant = self._runner.kv_variant(len(sequence.token_ids))
        return TokenOutput(request_id, token_id, reason, sampled.logprobs, prefill)

    def _end(self, sequence: Sequence) -> None:
        """No output follows. Row and blocks stay its own while a step that writes to them is in flight."""
        del self._sequences[sequence.request.request_id]
        self._prompts.drop(sequence)
        sequence.has_ended = sequence.is_complete = True
        if not sequence.steps_in_flight:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.has_bad_numbers:
            self._runner.scrub(self._blocks.forget(sequence))
        self._scheduler.remove(sequence)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        params = sequence.request.sampling
        if token_id in params.stop_token_ids:  # before min_tokens, the sampler keeps these and EOS from coming up
            return FinishReason.STOP
        if token_id in self.model_config.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._is_at_length(sequence, sequence.num_read_tokens) else None

    def _is_at_length(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens has all that it may have."""
        num_generated = num_tokens - sequence.num_prompt_tokens
        return num_generated >= sequence.request.sampling.max_tokens or num_tokens >= self.model_config.max_model_len

    def _check_request(self, request: Request) -> None:
        prompt, limit = request.prompt_token_ids, self.model_config.max_model_len
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is already running")
        if not 0 < len(prompt) < limit:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; it must have 1 to {limit - 1} (max_model_len {limit})"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.model_config.vocab_size:
            raise ValueError(f"a prompt token is outside the vocabulary of {self.model_config.vocab_size}")
        named = {*request.sampling.stop_token_ids, *(token_id for token_id, _ in request.sampling.logit_bias)}
        if named and not 0 <= min(named) <= max(named) < self.model_config.vocab_size:
            raise ValueError(f"a stop or biased token is outside the vocabulary of {self.model_config.vocab_size}")
        if request.sampling.max_tokens < 1:
            raise ValueError(f"max_tokens is {request.sampling.max_tokens}; it must be at least 1")


def _prefill(sequence: Sequence) -> Prefill:
    """What the first token of a sequence tells about its prompt."""
    wants_prompt = sequence.request.sampling.prompt_logprobs is not None
    return Prefill(
        scheduled_at_seconds=sequence.scheduled_at_seconds or 0.0,
        num_cached_tokens=sequence.num_cached_tokens,
        prompt_logprobs=tuple(sequence.prompt_logprobs) if wants_prompt else None,
    )


def _window_of_all_layers(model_config: ModelConfig) -> int | None:
    """How far back any layer looks; None where one looks to the start, and so needs every block."""
    windows = [window for window in model_config.windows if window is not None]
    return max(windows) if windows and len(windows) == model_config.num_layers else None
