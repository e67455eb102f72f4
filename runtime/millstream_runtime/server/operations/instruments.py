"""Counters and histograms that are cheap enough to update for every token.

Those of prometheus_client may be used by any thread: each takes up to three locks and searches its buckets linearly.
These are used on the event loop only, which also reads them at a scrape; the exposition is the same.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.utils import floatToGoString


class LoopCounter:
    """A total. A collector of prometheus_client."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str]) -> None:
        self._name, self._text, self._labels = name, text, dict(labels)
        self._created_at_unix_seconds = time.time()
        self._total = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self._total += amount

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=[*self._labels])
        created = self._created_at_unix_seconds if _shows_created() else None
        family.add_metric([*self._labels.values()], self._total, created)
        yield family


class LoopHistogram:
    """Observations by bucket; a value equal to a bound counts below it. A collector of prometheus_client."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        """`bounds` ascend; an infinite one is appended."""
        self._name, self._text, self._labels = name, text, dict(labels)
        self._created_at_unix_seconds = time.time()
        self._bounds = [*bounds, float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, amount: float) -> None:
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    @property
    def totals(self) -> tuple[float, int]:
        """The sum of all observations, and their number."""
        return self._sum, sum(self._counts)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=[*self._labels])
        so_far, buckets = 0, []
        for bound, count in zip(self._bounds, self._counts, strict=True):
            so_far += count
            buckets.append((floatToGoString(bound), float(so_far)))  # type: ignore[no-untyped-call]
        family.add_metric([*self._labels.values()], buckets, self._sum)
        if _shows_created():
            family.add_sample(f"{self._name}_created", self._labels, self._created_at_unix_seconds)
        yield family


class RecentMean:
    """The mean of a histogram's last observations: those of a round before count DECAY times as much."""

    DECAY = 0.95

    def __init__(self, histogram: LoopHistogram) -> None:
        self._histogram = histogram
        self._totals = histogram.totals
        self._sum = self._count = 0.0

    def end_round(self) -> None:
        """Take in what was observed since the last round; one without observations changes nothing."""
        (total, number), before = self._histogram.totals, self._totals
        if number == before[1]:
            return
        self._sum = self.DECAY * self._sum + total - before[0]
        self._count = self.DECAY * self._count + number - before[1]
        self._totals = total, number

    @property
    def value(self) -> float | None:
        """None before the first observation."""
        return self._sum / self._count if self._count else None


def _shows_created() -> bool:
    """Whether to emit `_created` series; follows prometheus_client's own variable."""
    return os.environ.get("PROMETHEUS_DISABLE_CREATED_SERIES", "false").lower() not in ("true", "1", "t")
