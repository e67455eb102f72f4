"""The same load on an engine in this process: no HTTP, no tokenizer, one thread.

    due requests ─► Engine.add_request ─► step, step, step … ─► RequestRecord

The difference from a run against `millstream serve` on the same machine is the cost of serving. A request that becomes
due within a step is added after it, as in the server; its latency counts from when it was due.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from millstream.bench.endpoint import LoadResult, stopwatch
from millstream.bench.measure import RequestRecord
from millstream.bench.openai_api import Clock
from millstream.bench.progress import LoadProgress
from millstream.bench.workload import PlannedRequest, TokenIdPrompts, WorkloadSpec
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.errors import InvalidConfigError

if TYPE_CHECKING:
    from millstream_runtime.engine.request import Request, TokenOutput

DRAW_EVERY_SECONDS = 0.2


class EngineLike(Protocol):
    """The part of `millstream_runtime.engine.engine.Engine` that a load needs."""

    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> Sequence[TokenOutput]: ...
    def has_work(self) -> bool: ...


def prompts(requests: Sequence[PlannedRequest], maker: TokenIdPrompts, folder: Path) -> list[list[int]]:
    """Token ids of every request; the tokenizer is read only if the trace has texts."""
    if not any(request.prompt is not None for request in requests):
        return [maker.make(request.index, request.input_tokens or 1) for request in requests]
    from millstream_runtime.tokenizing.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    return [
        tokenizer.encode(request.prompt)
        if request.prompt is not None
        else maker.make(request.index, request.input_tokens or 1)
        for request in requests
    ]


def check_lengths(
    requests: Sequence[PlannedRequest], token_ids: Sequence[Sequence[int]], max_model_len: int, vocab_size: int
) -> None:
    """Check the lengths that the engine would reject in the middle of the run.

    Raises:
        InvalidConfigError: a request that does not fit the model.
    """
    for request, prompt in zip(requests, token_ids, strict=True):
        if len(prompt) + request.output_tokens > max_model_len:
            raise InvalidConfigError(
                f"Request {request.index} has {len(prompt)} + {request.output_tokens} tokens; the model takes "
                f"{max_model_len} (--max-model-len, or its own limit)."
            )
        if max(prompt) >= vocab_size:
            raise InvalidConfigError(
                f"The prompts have token ids up to {max(prompt)}, and the model's vocabulary has {vocab_size}: "
                "give --token-ids LOW:HIGH."
            )


class OfflineRun:
    """Drives an engine through a plan. `records` stays valid when Ctrl-C ends `run`."""

    def __init__(
        self,
        engine: EngineLike,
        requests: Sequence[PlannedRequest],
        token_ids: Sequence[Sequence[int]],
        *,
        temperature: float,
        ignore_eos: bool,
        progress: LoadProgress,
    ) -> None:
        self._engine = engine
        self._waiting = deque(zip(requests, token_ids, strict=True))
        self._temperature = temperature
        self._ignore_eos = ignore_eos
        self._progress = progress
        self._running: dict[str, RequestRecord] = {}
        self.records: list[RequestRecord] = []

    def run(self, concurrency: int | None) -> LoadResult:
        """Run until all have ended; `concurrency` None: at the plan's arrival times."""
        clock = stopwatch()
        drawn = 0.0
        try:
            while self._waiting or self._running:
                self._add_due(clock, concurrency)
                if self._engine.has_work():
                    self._take(self._engine.step(), clock())
                else:
                    time.sleep(max(0.0, (self._waiting[0][0].arrival_seconds or 0.0) - clock()))
                if clock() - drawn > DRAW_EVERY_SECONDS:
                    self._progress.draw()
                    drawn = clock()
        except KeyboardInterrupt:
            for request_id in self._running:
                self._engine.abort(request_id)
            return LoadResult(self.records, interrupted=True)
        finally:
            self._progress.close()
        return LoadResult(self.records, interrupted=False)

    def _add_due(self, clock: Clock, concurrency: int | None) -> None:
        from millstream_runtime.engine.request import Request, SamplingParams

        while self._waiting:
            request, prompt = self._waiting[0]
            now = clock()
            due = now if concurrency is not None else request.arrival_seconds or 0.0
            if due > now or (concurrency is not None and len(self._running) >= concurrency):
                return
            self._waiting.popleft()
            record = RequestRecord(request.index, due, now, prompt_tokens=len(prompt))
            self.records.append(record)
            self._running[str(request.index)] = record
            self._progress.began()
            sampling = SamplingParams(
                request.output_tokens, temperature=self._temperature, ignore_eos=self._ignore_eos, seed=request.index
            )
            self._engine.add_request(Request(str(request.index), prompt, sampling))

    def _take(self, outputs: Sequence[TokenOutput], now: float) -> None:
        for output in outputs:
            record = self._running[output.request_id]
            if output.token_id is not None:
                record.chunk_seconds.append(now)
                record.completion_tokens += 1
            if output.finish_reason is not None:
                if output.token_id is None:
                    record.error = "The engine gave the request up: its logits are not numbers."
                record.end_seconds = now
                del self._running[output.request_id]
                self._progress.ended(record)


def run_offline(
    config: RuntimeConfig,
    spec: WorkloadSpec,
    requests: Sequence[PlannedRequest],
    maker: TokenIdPrompts,
    *,
    temperature: float,
    ignore_eos: bool,
    progress: LoadProgress,
) -> LoadResult:
    """Load the model, warm it up, run the plan.

    Raises:
        RuntimeFailure: the model cannot be loaded, or the plan does not fit it.
    """
    from millstream_runtime.engine.engine import Engine

    token_ids = prompts(requests, maker, Path(config.model))
    engine = Engine(config, lambda _phase, _message: None)
    check_lengths(requests, token_ids, engine.model_config.max_model_len, engine.model_config.vocab_size)
    engine.warm_up()
    run = OfflineRun(engine, requests, token_ids, temperature=temperature, ignore_eos=ignore_eos, progress=progress)
    return run.run(spec.concurrency)
