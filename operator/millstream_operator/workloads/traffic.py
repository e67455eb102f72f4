"""What replicas answered, by their own counters. Pure.

Generations that a client gave up (`finished_reason="abort"`) say nothing about the model, so they are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values by bucket. `edges`: upper bounds, ascending, the last infinite; `counts`: of each bucket."""

    edges: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return sum(self.counts)

    def is_after(self, before: Histogram) -> bool:
        """Whether it may be a later reading of the same process."""
        if before.edges != self.edges:
            return not before.edges
        return all(now >= then for now, then in zip(self.counts, before.counts, strict=True))

    def since(self, before: Histogram) -> Histogram:
        if not before.edges:
            return self
        return Histogram(self.edges, tuple(now - then for now, then in zip(self.counts, before.counts, strict=True)))

    def plus(self, other: Histogram) -> Histogram:
        """Return the sum; none where the buckets differ, because then no bucket of one is one of the other."""
        if not self.edges or not other.edges:
            return self if self.edges else other
        if self.edges != other.edges:
            return Histogram()
        return Histogram(self.edges, tuple(map(sum, zip(self.counts, other.counts, strict=True))))

    def most_squares(self, values_sum: float) -> float:
        """Return the largest sum of squares that values of these counts can have, if they add up to `values_sum`.

        A square in [low, high] is at most (low + high) x - low high, the chord of the parabola (Bhatia and Davis,
        "A better bound on the variance", 2000). What the values exceed their lower bounds by is then largest in the
        highest buckets.
        """
        lows = (0.0, *self.edges[:-1])
        squares = sum(count * low * low for count, low in zip(self.counts, lows, strict=True))
        excess = max(0.0, values_sum - sum(count * low for count, low in zip(self.counts, lows, strict=True)))
        for low, high, count in zip(reversed(lows), reversed(self.edges), reversed(self.counts), strict=True):
            if not count:
                continue
            if math.isinf(high):
                return squares + 2 * low * excess + excess * excess  # one value takes all of it
            taken = min(excess, count * (high - low))
            squares, excess = squares + (low + high) * taken, excess - taken
        return squares

    def distance(self, other: Histogram) -> float:
        """Return the total variation distance of the two distributions, 0 to 1; 1 where they cannot be compared."""
        if self.edges != other.edges or not self.count or not other.count:
            return 1.0
        shares = ((a / self.count, b / other.count) for a, b in zip(self.counts, other.counts, strict=True))
        return sum(abs(a - b) for a, b in shares) / 2


def histogram_of(cumulative: Iterable[tuple[float, float]]) -> Histogram:
    """Return the histogram of Prometheus' buckets (upper bound, count up to it); an empty one where they make none."""
    buckets = sorted(cumulative)
    edges, totals = tuple(edge for edge, _ in buckets), [0, *(int(count) for _, count in buckets)]
    if not edges or not math.isinf(edges[-1]) or any(a >= b for a, b in pairwise(edges)):
        return Histogram()
    counts = tuple(b - a for a, b in pairwise(totals))
    return Histogram(edges, counts) if min(counts) >= 0 else Histogram()


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts since a process began, or in a span of time.

    `stop`, `length`, `error`: finished generations by vLLM's `finished_reason`; one whose numbers are not finite ends
    with `error`. `token_times`: complete answers by their own mean time per token after the first, and
    `token_times_seconds` the sum of those means. `prompt_tokens`, `max_tokens`: complete answers by the length of their
    prompt and by their limit. `engine_restarts`: engines that were started again while the process lived.
    `started_at_seconds`: of the process; 0: not known, or a span of time.
    """

    stop: int = 0
    length: int = 0
    error: int = 0
    token_times: Histogram = Histogram()
    token_times_seconds: float = 0.0
    prompt_tokens: Histogram = Histogram()
    max_tokens: Histogram = Histogram()
    engine_restarts: int = 0
    started_at_seconds: float = 0.0

    @property
    def finished(self) -> int:
        return self.stop + self.length + self.error

    @property
    def complete(self) -> int:
        return self.stop + self.length

    @property
    def mean_token_seconds(self) -> float | None:
        """The mean over answers of their mean time per token; None: no answer had two tokens."""
        return self.token_times_seconds / count if (count := self.token_times.count) else None

    def since(self, before: Traffic) -> Traffic:
        """Return what came after `before`. A process that began anew counts from zero."""
        if not self._is_after(before):
            return self
        return Traffic(
            self.stop - before.stop,
            self.length - before.length,
            self.error - before.error,
            self.token_times.since(before.token_times),
            self.token_times_seconds - before.token_times_seconds,
            self.prompt_tokens.since(before.prompt_tokens),
            self.max_tokens.since(before.max_tokens),
            self.engine_restarts - before.engine_restarts,
        )

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(
            self.stop + other.stop,
            self.length + other.length,
            self.error + other.error,
            self.token_times.plus(other.token_times),
            self.token_times_seconds + other.token_times_seconds,
            self.prompt_tokens.plus(other.prompt_tokens),
            self.max_tokens.plus(other.max_tokens),
            self.engine_restarts + other.engine_restarts,
        )

    def _is_after(self, before: Traffic) -> bool:
        if before.started_at_seconds and before.started_at_seconds != self.started_at_seconds:
            return False
        numbers = ("stop", "length", "error", "token_times_seconds", "engine_restarts")
        histograms = ("token_times", "prompt_tokens", "max_tokens")
        return all(getattr(self, name) >= getattr(before, name) for name in numbers) and all(
            getattr(self, name).is_after(getattr(before, name)) for name in histograms
        )


NO_TRAFFIC = Traffic()
