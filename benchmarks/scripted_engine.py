"""`python -m benchmarks.scripted_engine FD`: an engine process that computes nothing.

It speaks the protocol of `engine_process`: a step gives the first `max_num_seqs` requests their next token, from a
fixed list, as fast as the HTTP process takes them, or after STEP_SECONDS_VARIABLE; the others wait in order. So what is
measured is the HTTP process alone, at the highest load there can be or at that of one GPU.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from millstream_runtime.boot import Phase
from millstream_runtime.config import GovernorMode, RuntimeConfig
from millstream_runtime.distributed.topology import Topology
from millstream_runtime.engine.kernel_backends import KernelChoice, LinearChoice
from millstream_runtime.engine.kv.pool_size import MemoryUse
from millstream_runtime.engine.request import EngineStats, FinishReason, Prefill, Request, TokenLogprobs, TokenOutput
from millstream_runtime.engine.step_times import TimedStep
from millstream_runtime.engine_process.__main__ import main
from millstream_runtime.engine_process.loop import EngineLike, OnLost, OnPhase

MAX_MODEL_LEN = 1 << 17
VOCAB_SIZE = 256
TOKEN_IDS = range(80, 110)
STEP_SECONDS_VARIABLE = "MILLSTREAM_SCRIPTED_STEP_SECONDS"


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """What the loop reads of a model's configuration."""

    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class ScriptedThreads:
    """One thread, which does nothing."""

    all_threads: int = 1
    limits: tuple[tuple[int, int], ...] = ()


@dataclass
class ScriptedEngine:
    """See `engine_process.loop.EngineLike`. A request ends after its `max_tokens`."""

    model_config: ScriptedModel = ScriptedModel()
    topology: Topology | None = None
    memory_use: MemoryUse = field(
        default_factory=lambda: MemoryUse(
            weights_bytes=0, activations_bytes=None, graphs_bytes=None, kv_cache_bytes=0, kv_cache_tokens=MAX_MODEL_LEN
        )
    )
    kernels: tuple[KernelChoice, ...] = ()
    kernel_lookups: Mapping[str, int] = field(default_factory=dict)
    linears: tuple[LinearChoice, ...] = ()
    threads: ScriptedThreads = ScriptedThreads()
    step_times: tuple[TimedStep, ...] = ()
    step_seconds: float = 0.0
    max_num_seqs: int = 64
    steps: int = 0
    requests: dict[str, tuple[Request, int]] = field(default_factory=dict)  # in order, with the tokens that each has

    def set_target_itl(self, milliseconds: int | None) -> None:
        """There are no steps to bound."""

    def when_lost(self, on_lost: OnLost) -> None:
        """There are no ranks to lose."""

    def close(self) -> None:
        """There is nothing to free."""

    def warm_up(self) -> None:
        """There is nothing to compute."""

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = (request, 0)

    def abort(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def set_speculation_governor(self, mode: GovernorMode) -> None:
        """Nothing drafts."""

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> Sequence[TokenOutput]:
        self.steps += 1
        time.sleep(self.step_seconds)
        running = list(islice(self.requests.values(), self.max_num_seqs))
        return [self._next_token(request, count) for request, count in running]

    def stats(self) -> EngineStats:
        running = min(len(self.requests), self.max_num_seqs)
        return EngineStats(running, len(self.requests) - running, 1, running, 16, 0, self.steps)

    def _next_token(self, request: Request, count: int) -> TokenOutput:
        token_id = TOKEN_IDS[count % len(TOKEN_IDS)]
        is_last = count + 1 == request.sampling.max_tokens
        if is_last:
            del self.requests[request.request_id]
        else:
            self.requests[request.request_id] = (request, count + 1)
        alternatives = request.sampling.logprobs
        top = tuple((token, -1.0) for token in TOKEN_IDS[: alternatives or 0])
        return TokenOutput(
            request.request_id,
            token_id,
            FinishReason.LENGTH if is_last else None,
            TokenLogprobs(token_id, -0.5, 1, top) if alternatives is not None else None,
            Prefill(time.monotonic(), 0, _prompt_logprobs(request)) if count == 0 else None,
        )


def _prompt_logprobs(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
    """Of each prompt token but the first, with alternatives that are always the same; None: not requested."""
    alternatives = request.sampling.prompt_logprobs
    if alternatives is None:
        return None
    top = tuple((token, -1.0) for token in TOKEN_IDS[:alternatives])
    return (None, *(TokenLogprobs(token_id, -0.5, 1, top) for token_id in request.prompt_token_ids[1:]))


def make_scripted_engine(config: RuntimeConfig, on_phase: OnPhase) -> EngineLike:
    """Its boot is its phases."""
    for phase in (Phase.LOADING_WEIGHTS, Phase.SIZING_KV_CACHE, Phase.WARMING_UP):
        on_phase(phase, "")
    step_seconds = float(os.environ.get(STEP_SECONDS_VARIABLE, 0))
    return ScriptedEngine(step_seconds=step_seconds, max_num_seqs=config.max_num_seqs)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), make_scripted_engine))
