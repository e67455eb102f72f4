"""The engine: load once, then `add_request`, `step`, `step`, ... One thread calls it; nothing here waits or sleeps.

    add_request -> Scheduler.plan -> ChunkedPrefill.apply -> ModelRunner.launch -> read -> accept tokens -> TokenOutput

A step is read as soon as it is launched. Where steps overlap (see `overlap`), it is read after the next is launched.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.distributed.topology import Topology
from millstream_runtime.engine.device_policy import ThreadCounts
from millstream_runtime.engine.execution.execution_mode import Execution
from millstream_runtime.engine.execution.graphs import GraphUse
from millstream_runtime.engine.execution.last_tokens import LastTokens
from millstream_runtime.engine.execution.model_runner import ModelRunner, Sampled
from millstream_runtime.engine.execution.overlap import StepInFlight, reasons_to_wait
from millstream_runtime.engine.execution.rank_group import LoadedModel, RankGroup, load_on_ranks, start_rank_group
from millstream_runtime.engine.kv.pool_size import MemoryUse
from millstream_runtime.engine.request import EngineStats, FinishReason, Prefill, Request, TokenOutput
from millstream_runtime.engine.sampling.logits_processors import LogitsProcessor
from millstream_runtime.engine.scheduling.block_manager import BlockManager
from millstream_runtime.engine.scheduling.chunked_prefill import ChunkedPrefill
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
        memory_use: bytes that weights and pool take on this device, as far as measured.
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
    ) -> None:
        """Load the model and size the KV pool; `warm_up` comes after.

        Args:
            on_phase: `on_phase(phase, message)` is called when a phase of loading begins.
            rank_group: ranks that are running already; by default the engine starts its own.
            on_read: `on_read(done_bytes, total_bytes)` is called after each tensor of the checkpoint.
            execution: how steps are executed; by default as `execution_mode.choose` says for the device.

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
        self.model_config: ModelConfig = replace(
            loaded.shard_config.model_config, max_model_len=loaded.pool.max_model_len
        )
        self._max_num_seqs = config.max_num_seqs
        self._make_scheduler(config, loaded)
        self._make_runner(config, loaded)
        self._in_flight: StepInFlight | None = None
        self._read_at_seconds = 0.0  # by the step clock
        self.step_clock: Callable[[], float] = time.perf_counter  # measures the pace
        self._sequences: dict[str, Sequence] = {}
        self._num_arrivals = 0
        self._steps_total = 0
        self._last_step_tokens = 0
        self.processors_for: Callable[[Request], tuple[LogitsProcessor, ...]] = lambda request: ()

    def _make_scheduler(self, config: RuntimeConfig, loaded: LoadedModel) -> None:
        self._blocks = BlockManager(
            loaded.pool.num_blocks,
            config.block_size_tokens,
            config.max_num_seqs,
            enable_prefix_caching=config.enable_prefix_caching,
            window_tokens=self.model_config.longest_window,
        )
        self._scheduler = Scheduler(self._blocks, config.max_num_batched_tokens, config.max_num_seqs)

    def _make_runner(self, config: RuntimeConfig, loaded: LoadedModel) -> None:
        """The model runner, and what decides how much of prompts it computes."""
        self._policy = loaded.shard_config.policy
        self._overlaps = loaded.execution.overlapped
        last_tokens = LastTokens(config.max_num_seqs, loaded.forward.device) if self._overlaps else None
        self._runner = ModelRunner(
            loaded.forward, self.model_config.eos_token_ids, self._policy, self._rank_group.broadcast, last_tokens
        )
        side = self._policy.side_prefill(self._runner, loaded.execution.side_threads)
        self._chunked_prefill = ChunkedPrefill(
            self.model_config,
            config.block_size_tokens,
            side,
            is_bounded_by_time=self._policy.bounds_prompts_by_time,
        )

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
        """End what computes next to the steps, and the other ranks. They also end when this process does."""
        self._chunked_prefill.close()
        self._rank_group.close()

    def add_request(self, request: Request) -> None:
        """Queue a request; its first token comes from a later `step`.

        Raises:
            ValueError: an id in use, an empty or too long prompt, an id outside the vocabulary, no token asked for.
        """
        self._check_request(request)
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
            self._end(sequence)

    def has_work(self) -> bool:
        """Whether `step` has anything to compute, or a lost rank to raise."""
        return self._scheduler.has_work or self._rank_group.is_lost

    def step(self) -> list[TokenOutput]:
        """Compute one step for all requests that fit in it; at most one new token per request.

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
        launched = self._launch(*self._chunked_prefill.apply(plan, self._scheduler))
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
        """Plan the next step. Its prompts are bounded by the longest context among them."""
        prompts = [one.num_computed_tokens for one in self._scheduler.running if one.num_uncomputed_tokens > 1]
        most_tokens = None
        if prompts or self._scheduler.num_waiting:
            most_tokens = self._chunked_prefill.most_tokens(max(prompts, default=0))
        return self._scheduler.plan(most_tokens, self._chunked_prefill.partial)

    def _launch(self, chunks: list[Chunk], layer_slice: ChunkSlice | None) -> StepInFlight | None:
        """Give the device a step. From here on its tokens count as computed, and those it samples as known."""
        touched = [*chunks, *(layer_slice.chunks if layer_slice is not None else ())]
        if not touched:
            return None
        for sequence, _ in touched:
            sequence.steps_in_flight += 1
        began, shape, graphs = self.step_clock(), self._chunked_prefill.step_time(chunks, layer_slice), self.graphs
        slice_began: list[float] = []
        with self._rank_group.computing():
            launched = self._runner.launch(chunks, layer_slice, lambda: slice_began.append(self.step_clock()))
        if shape is not None and slice_began and self._policy.is_synchronous:
            shape = replace(shape, decode_seconds=slice_began[0] - began)
        recorded = graphs is not None and self.graphs is not None and self.graphs.num_tried > graphs.num_tried
        self._count_as_computed(chunks, layer_slice)
        for sequence in launched.sampling:
            sequence.expect()
            sequence.is_complete = self._is_at_length(sequence, len(sequence.token_ids))
        return StepInFlight(launched, touched, None if recorded else shape, began)

    def _count_as_computed(self, chunks: list[Chunk], layer_slice: ChunkSlice | None) -> None:
        sliced = layer_slice.chunks if layer_slice is not None and layer_slice.is_last else []
        self._scheduler.advance([*chunks, *sliced])
        self._steps_total += 1
        self._last_step_tokens = sum(n for one, n in [*chunks, *sliced] if not one.request.is_heartbeat)

    def _read(self) -> list[TokenOutput]:
        """Wait for the step in flight, then accept or end its sequences."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        with self._rank_group.computing():
            sampled = step.launched.read()
        now = self.step_clock()
        # The device began with it when it was launched, or when it was done with the step before.
        if step.shape is not None:
            seconds = now - max(step.began_at_seconds, self._read_at_seconds)
            self._chunked_prefill.pace.observe(replace(step.shape, seconds=seconds))
        self._read_at_seconds = now
        for sequence, _ in step.chunks:
            sequence.steps_in_flight -= 1
        leaving = [one for one, _ in step.chunks if one.has_ended and not one.steps_in_flight]
        outputs = []
        for sequence, one in zip(step.launched.sampling, sampled, strict=True):
            if one.token_id is None:
                sequence.has_bad_numbers = True
                self._blocks.unpublish(sequence)
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
        """Run the first steps, so that no request pays for first-time work: see `warm_up.WarmUp`.

        Raises:
            RuntimeFailure: CheckpointInvalid, where the first answer is not a number.
        """
        self._on_phase("WarmingUp", "Running the first steps.")
        warm_up = WarmUp(self, self._max_requests, self.model_config.max_model_len)
        warm_up.run(self._policy, is_only_rank=self._rank_group.ranks.size == 1)
        self._chunked_prefill.reset_pace()  # first steps are slow, and may have had other numbers of threads
        self.check_integrity()

    def _max_requests(self, num_tokens: int) -> int:
        """How many requests of `num_tokens`, prompt included, run at once; 0 if longer than the engine allows."""
        if num_tokens > self.model_config.max_model_len:
            return 0
        return min(self._max_num_seqs, self._blocks.num_blocks // self._blocks.blocks_for(num_tokens))

    def check_integrity(self) -> None:
        """Check that every KV block is free or held by running requests, and that no request is lost.

        Raises:
            RuntimeError: names what leaked.
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
        """End a request: no output follows. It keeps row and blocks while a step that writes to them is in flight."""
        del self._sequences[sequence.request.request_id]
        self._chunked_prefill.drop(sequence)
        sequence.has_ended = sequence.is_complete = True
        if not sequence.steps_in_flight:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.has_bad_numbers:
            self._runner.zero_blocks(self._blocks.unpublish(sequence))
        self._scheduler.remove(sequence)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        params = sequence.request.sampling
        if token_id in params.stop_token_ids:  # before min_tokens, the sampler suppresses these and EOS
            return FinishReason.STOP
        if token_id in self.model_config.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._is_at_length(sequence, sequence.num_read_tokens) else None

    def _is_at_length(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` has reached `max_tokens` or `max_model_len`."""
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
    """What is reported of a prompt with the first token."""
    wants_prompt = sequence.request.sampling.prompt_logprobs is not None
    return Prefill(
        scheduled_at_seconds=sequence.scheduled_at_seconds or 0.0,
        num_cached_tokens=sequence.num_cached_tokens,
        prompt_logprobs=tuple(sequence.prompt_logprobs) if wants_prompt else None,
    )
