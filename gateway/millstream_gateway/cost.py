"""The seconds until a replica would send the first token of a request. No weights: every term is a time.

    backlog ─┐
    own      ┴─▶ tokens ÷ prefill rate  +  wait for KV blocks  +  what running decodes slow it down

The rate is that of the steps that prefilled. Tokens per second of the clock would rank busy replicas fast, and idle
ones have none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from millstream_gateway.picker_beliefs import PickerBeliefs
from millstream_gateway.replica_report import Replica
from millstream_gateway.routed_request import RoutedRequest

UNREPORTED_PREFILL_TOKENS_PER_SECOND = 1000.0  # where no replica of the model has measured its own
STEP_TOKENS = 2048  # that one step computes at most: the engine's default


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds until the first token, by what takes them, and the tokens that they come from."""

    cached_tokens: float
    uncached_tokens: float
    backlog_tokens: float  # of other prompts, to be computed before
    prefill_seconds: float
    kv_wait_seconds: float
    decode_seconds: float
    free_tokens: float  # of the KV cache, after this request

    @property
    def seconds(self) -> float:
        """Return the sum."""
        return self.prefill_seconds + self.kv_wait_seconds + self.decode_seconds


def usual_prefill_rate(replicas: Sequence[Replica]) -> float:
    """Return the rate of a replica that reports none: the median of the others'."""
    rates = [one.report.prefill_tokens_per_second for one in replicas if one.report is not None]
    measured = [rate for rate in rates if rate is not None]
    return statistics.median(measured) if measured else UNREPORTED_PREFILL_TOKENS_PER_SECOND


def cost(
    request: RoutedRequest,
    replica: Replica,
    cached_tokens: float,
    beliefs: PickerBeliefs,
    now_seconds: float,
    usual_rate: float,
) -> Cost:
    """Return what the request would take there. `usual_rate`: of a replica that reports none."""
    report = replica.report
    rate = (report.prefill_tokens_per_second if report is not None else None) or usual_rate
    prompt_tokens = beliefs.prompt_tokens(request)
    cached_tokens = min(cached_tokens, max(0.0, prompt_tokens - 1))
    uncached_tokens = prompt_tokens - cached_tokens
    backlog_tokens, unreported_tokens = _backlog(replica, beliefs, now_seconds, rate)
    free_tokens = (report.free_tokens if report is not None else 0) - unreported_tokens - prompt_tokens
    itl_seconds = report.itl_seconds if report is not None and report.running_requests else None
    steps = math.ceil((backlog_tokens + uncached_tokens) / STEP_TOKENS)
    return Cost(
        cached_tokens,
        uncached_tokens,
        backlog_tokens,
        prefill_seconds=(backlog_tokens + uncached_tokens) / rate,
        kv_wait_seconds=_kv_wait_seconds(replica, beliefs, -free_tokens),
        decode_seconds=steps * (itl_seconds or 0.0),  # each step also computes a token of each running request
        free_tokens=free_tokens,
    )


def _backlog(replica: Replica, beliefs: PickerBeliefs, now_seconds: float, rate: float) -> tuple[float, float]:
    """Return the tokens to compute there by now, and the whole prompts that the report cannot know of.

    The report's queue shrinks at the prefill rate from then on, and grows by what this picker sent since.
    """
    seconds = replica.reported_at_seconds
    tokens = float(replica.report.queued_tokens) if replica.report is not None else 0.0
    unreported_tokens = 0.0
    for decision in reversed([*beliefs.sent_since(replica)]):
        tokens = max(0.0, tokens - rate * (decision.decided_at_seconds - seconds)) + decision.uncached_tokens
        seconds = decision.decided_at_seconds
        unreported_tokens += decision.prompt_tokens
    return max(0.0, tokens - rate * max(0.0, now_seconds - seconds)), unreported_tokens


def _kv_wait_seconds(replica: Replica, beliefs: PickerBeliefs, missing_tokens: float) -> float:
    """Return how long running requests take to free this many tokens: each ends after a usual answer."""
    report = replica.report
    if report is None or not report.total_blocks or missing_tokens <= 0:
        return 0.0
    if not report.running_tokens or report.itl_seconds is None:
        return 0.0  # only queued prompts are in the way, and their time is counted already
    freed_per_second = report.running_tokens / (beliefs.answer_tokens * report.itl_seconds)
    return missing_tokens / freed_per_second
