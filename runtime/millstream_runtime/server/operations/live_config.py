"""The live half of the configuration: a file that is looked at every two seconds and taken over without a restart.

    kubelet swaps the mounted ConfigMap -> LiveConfigFile.look() -> apply(LiveConfig): heartbeats, log level

A file that cannot be read or used changes nothing: the last good values stay, and the log and a metric say so. A thread
of its own looks, so that a slow disk holds up no stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from millstream_runtime.config import LiveConfig
from millstream_runtime.config_files import parse_live, read_text
from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.logs import log

POLL_SECONDS = 2.0


class LiveConfigFile(Collector):
    """Watches one file. `apply` is called in the watching thread, with each usable change; it must not raise.

    As a Prometheus collector it tells whether the file is usable now, and how often it was taken over.
    """

    def __init__(
        self,
        path: Path,
        apply: Callable[[LiveConfig], None],
        *,
        labels: dict[str, str],
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._path, self._apply, self._labels, self._poll_seconds = path, apply, labels, poll_seconds
        self._applied: LiveConfig | None = None
        self._told = ""
        self._loads = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-config", daemon=True)

    @property
    def is_bad(self) -> bool:
        """The file, as it is now, cannot be used."""
        return bool(self._told)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def look(self) -> None:
        """Look once. A problem is logged once, not at every look."""
        try:
            live = parse_live(read_text(self._path), self._path)
        except InvalidConfigError as error:
            if error.message != self._told:
                log.warning("live_config_bad", message=error.message, kept="the last good values")
            self._told = error.message
            return
        self._told = ""
        if live != self._applied:
            self._apply(live)
            self._applied = live
            self._loads += 1
            log.info("live_config", **live.as_dict())

    def collect(self) -> Iterable[Metric]:
        bad = GaugeMetricFamily(
            "millstream_live_config_bad",
            "1 while the live configuration cannot be used and the last good one holds",
            labels=[*self._labels],
        )
        bad.add_metric([*self._labels.values()], float(self.is_bad))
        yield bad
        loads = CounterMetricFamily(
            "millstream_live_config_loads", "Live configurations taken over", labels=[*self._labels]
        )
        loads.add_metric([*self._labels.values()], self._loads)
        yield loads

    def _run(self) -> None:
        while True:
            self.look()
            if self._ended.wait(self._poll_seconds):
                return
