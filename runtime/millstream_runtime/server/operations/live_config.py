"""The live half of the configuration: a file that is polled every two seconds and applied without a restart.

    kubelet swaps the mounted ConfigMap -> LiveConfigFile.reload() -> apply(LiveConfig): heartbeats, log level, …

A file that cannot be read or used changes nothing: the last good values stay, and the log and a metric say so. A
separate thread polls, so that a slow disk delays no stream.
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
    """Watches one file. Calls `apply` in the polling thread with each valid change; it must not raise.

    As a Prometheus collector it reports whether the file is usable now, and how often it was applied.
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
        self._reported_error = ""
        self._loads = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-config", daemon=True)

    @property
    def is_bad(self) -> bool:
        """Whether the file, as it is now, cannot be used."""
        return bool(self._reported_error)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def reload(self) -> None:
        """Read the file once, and apply it if it changed. A problem is logged once, not at every poll."""
        try:
            live = parse_live(read_text(self._path), self._path)
        except InvalidConfigError as error:
            if error.message != self._reported_error:
                log.warning("live_config_bad", message=error.message, kept="the last good values")
            self._reported_error = error.message
            return
        self._reported_error = ""
        if live != self._applied:
            self._apply(live)
            self._applied = live
            self._loads += 1
            shown = {**live.as_dict(), "probe_key_digests": len(live.probe_key_digests)}
            log.info("live_config", **shown)

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
            self.reload()
            if self._ended.wait(self._poll_seconds):
                return
