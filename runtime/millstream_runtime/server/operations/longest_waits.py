"""How long the oldest request of each API key has waited for its first token, as a Prometheus metric.

A key is named by the first eight hex digits of its SHA-256. Keys are known to the server by their digests alone, and
at most as many as its file may hold have a series: those of the file of which a request has come.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

LABEL_CHARACTERS = 8


class LongestWaits(Collector):
    """Requests without a first token, by client. Used on the event loop only.

    Attributes:
        clients: returns the clients that may have a series; without API keys all requests are of the client "".
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._began_at_seconds = defaultdict[str, dict[str, float]](dict)  # by client and id of the engine's request
        self.clients: Callable[[], Collection[str]] = lambda: ("",)

    def begin(self, client: str, request_id: str, at_seconds: float) -> None:
        """A request has come. `at_seconds`: `time.monotonic()`."""
        self._began_at_seconds[client][request_id] = at_seconds

    def end(self, client: str, request_id: str) -> None:
        """Its first token has come, or it was given up. Safe to call twice."""
        self._began_at_seconds[client].pop(request_id, None)

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "millstream_longest_wait_seconds",
            "Wait of the oldest request without a first token, by API key",
            labels=[*self._labels, "key"],
        )
        now, known = time.monotonic(), self.clients()
        by_key = dict[str, float]()
        for client, began_at_seconds in [*self._began_at_seconds.items()]:
            if client not in known:
                if not began_at_seconds:
                    del self._began_at_seconds[client]  # its key was taken from the file
                continue
            key = client[:LABEL_CHARACTERS]
            seconds = now - min(began_at_seconds.values(), default=now)
            by_key[key] = max(seconds, by_key.get(key, 0.0))
        for key, seconds in by_key.items():
            family.add_metric([*self._labels.values(), key], seconds)
        yield family
