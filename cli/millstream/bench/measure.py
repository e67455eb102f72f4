"""Percentiles, throughput and goodput from the records of the requests. Pure; seconds in, seconds out.

    due            sent      first text          last text
     │  client delay │            │  gap  gap  gap  │
     ├───────────────┼────────────┼────┼────┼───────┤─────► time
     ├──────── TTFT ──────────────┤                 │
     ├──────── E2E ─────────────────────────────────┤

TTFT  time to the first text that could be shown, from when the request was due (see `workload` for why)
ITL   the gaps between successive pieces of text, over all requests. A server may send several tokens in one piece;
      `tokens_per_chunk` says how many, and then ITL is a gap between pieces, not between tokens.
TPOT  (E2E - TTFT) / (completion tokens - 1) of one request: the same gap as an average over counted tokens
E2E   from due to the last text

Token counts are those of the endpoint's `usage`, never the number of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from millstream_runtime.errors import InvalidConfigError

PERCENTILES = (50, 90, 95, 99)
OBJECTIVES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
ITL_OBJECTIVE_PERCENTILE = 99


@dataclass(slots=True)
class RequestRecord:
    """Times and counts of one request. All times in seconds since the start of the run.

    `arrival_seconds` is when it was due: fixed in advance in an open loop, the time of sending in a closed one.
    A request is complete when `end_seconds` is set and `error` is not.
    """

    index: int
    arrival_seconds: float
    sent_seconds: float
    chunk_seconds: list[float] = field(default_factory=list)  # of each piece of text, ascending
    end_seconds: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None

    @property
    def complete(self) -> bool:
        return self.end_seconds is not None and self.error is None

    @property
    def client_delay_seconds(self) -> float:
        return self.sent_seconds - self.arrival_seconds

    @property
    def ttft_seconds(self) -> float:
        return self.chunk_seconds[0] - self.arrival_seconds

    @property
    def e2e_seconds(self) -> float:
        return self.chunk_seconds[-1] - self.arrival_seconds

    @property
    def itl_seconds(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.chunk_seconds)]

    @property
    def tpot_seconds(self) -> float | None:
        """None for an answer of one token: it has no gap."""
        if self.completion_tokens < 2:
            return None
        return (self.e2e_seconds - self.ttft_seconds) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Count, mean and percentiles of samples, in their unit. All 0 without samples."""

    count: int
    mean: float
    percentiles: dict[int, float]

    @staticmethod
    def of(samples: Sequence[float]) -> Distribution:
        if not samples:
            return Distribution(0, 0.0, dict.fromkeys(PERCENTILES, 0.0))
        ordered = sorted(samples)
        return Distribution(
            len(ordered), math.fsum(ordered) / len(ordered), {p: percentile(ordered, p) for p in PERCENTILES}
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending samples, with linear interpolation between the two nearest (numpy's and pandas' default).

    Raises:
        ValueError: no samples, or a percentage outside 0 to 100.
    """
    if not ordered or not 0 <= percent <= 100:
        raise ValueError("a percentile needs samples, and 0 to 100 per cent")
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Objective:
    """A request is good when none of its latencies is above its limit. Limits in milliseconds, by name."""

    limits_ms: dict[str, float]

    @staticmethod
    def parse(text: str) -> Objective:
        """`ttft_ms:200,itl_ms:40`.

        Raises:
            InvalidConfigError: an unknown name, one twice, or a limit that is not a number above 0.
        """
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition(":"))
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            if name not in OBJECTIVES or name in limits or not 0 < limit < math.inf:
                known = ", ".join(OBJECTIVES)
                raise InvalidConfigError(
                    f"--goodput has {part.strip()!r}; each part must be NAME:MILLISECONDS, and the names are {known}."
                )
            limits[name] = limit
        return Objective(limits)

    def met_by(self, record: RequestRecord) -> bool:
        """False for a request that failed. A request's ITL is the 99th percentile of its own gaps."""
        if not record.complete:
            return False
        tpot, gaps = record.tpot_seconds, sorted(record.itl_seconds)
        seen = {
            "ttft_ms": record.ttft_seconds,
            "itl_ms": percentile(gaps, ITL_OBJECTIVE_PERCENTILE) if gaps else 0.0,
            "tpot_ms": tpot if tpot is not None else 0.0,
            "e2e_ms": record.e2e_seconds,
        }
        return all(seen[name] * 1e3 <= limit for name, limit in self.limits_ms.items())

    def describe(self) -> str:
        return ", ".join(f"{name.removesuffix('_ms')} ≤ {limit:g} ms" for name, limit in self.limits_ms.items())


@dataclass(frozen=True, slots=True)
class Measurement:
    """A whole run. Only complete requests count, except in `failed` and `unfinished`."""

    completed: int
    failed: int
    unfinished: int  # cut off by Ctrl-C
    duration_seconds: float  # from the first request's due time to the last answer's end
    prompt_tokens: int
    completion_tokens: int
    tokens_per_chunk: float
    ttft: Distribution
    itl: Distribution
    tpot: Distribution
    e2e: Distribution
    client_delay: Distribution
    good: int | None  # requests that met the objective; None without one

    @property
    def requests_per_second(self) -> float:
        return self._rate(self.completed)

    @property
    def output_tokens_per_second(self) -> float:
        return self._rate(self.completion_tokens)

    @property
    def total_tokens_per_second(self) -> float:
        return self._rate(self.prompt_tokens + self.completion_tokens)

    @property
    def goodput_requests_per_second(self) -> float | None:
        return None if self.good is None else self._rate(self.good)

    def _rate(self, count: int) -> float:
        return count / self.duration_seconds if self.duration_seconds > 0 else 0.0


def measure(records: Sequence[RequestRecord], objective: Objective | None = None) -> Measurement:
    """Summarise a run."""
    done = [record for record in records if record.complete]
    ends = [record.end_seconds for record in records if record.end_seconds is not None]
    start = min((record.arrival_seconds for record in records), default=0.0)
    completion_tokens = sum(record.completion_tokens for record in done)
    chunks = sum(len(record.chunk_seconds) for record in done)
    return Measurement(
        completed=len(done),
        failed=sum(record.error is not None for record in records),
        unfinished=sum(record.end_seconds is None and record.error is None for record in records),
        duration_seconds=max(ends, default=start) - start,
        prompt_tokens=sum(record.prompt_tokens for record in done),
        completion_tokens=completion_tokens,
        tokens_per_chunk=completion_tokens / chunks if chunks else 0.0,
        ttft=Distribution.of([record.ttft_seconds for record in done]),
        itl=Distribution.of([gap for record in done for gap in record.itl_seconds]),
        tpot=Distribution.of([tpot for record in done if (tpot := record.tpot_seconds) is not None]),
        e2e=Distribution.of([record.e2e_seconds for record in done]),
        client_delay=Distribution.of([record.client_delay_seconds for record in done]),
        good=None if objective is None else sum(objective.met_by(record) for record in done),
    )
