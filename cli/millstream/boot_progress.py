"""Boot progress for a person: each phase with its seconds, then the address and an example request.

On a terminal the running phase counts up in place. Elsewhere the server's log has the phases, and only the last lines
are printed, and none in a pod.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import TextIO

from millstream.output_streams import one_row
from millstream_runtime.boot import BOOT_PHASES, BootLedger, BootSnapshot, Phase
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.kv.pool_size import gibibytes

TICK_SECONDS = 0.1
CLEAR_LINE = "\r\x1b[2K"


class BootProgress:
    """Follows the ledger. `live`: the output is a terminal; `shows_example`: print an example request when Ready."""

    def __init__(
        self,
        ledger: BootLedger,
        config: RuntimeConfig,
        port: int,
        out: TextIO,
        *,
        live: bool,
        shows_example: bool = True,
    ) -> None:
        self._ledger = ledger
        self._config = config
        self._port = port
        self._out = out
        self._live = live
        self._shows_example = shows_example
        self._shown: set[Phase] = set()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        ledger.subscribe(self._on_change)
        if live:
            threading.Thread(target=self._tick, name="boot-view", daemon=True).start()

    def close(self) -> None:
        """Clear the progress line."""
        with self._lock:
            if self._live and not self._ended.is_set():
                self._write(CLEAR_LINE)
            self._ended.set()

    def _on_change(self, boot: BootSnapshot) -> None:
        with self._lock:
            if boot.phase is Phase.DRAINING and self._live:
                self._write("Finishing the running requests; press Ctrl-C again to exit at once.\n")
            if self._ended.is_set():
                return
            if self._live:
                self._finish_lines(boot)
            if boot.phase is Phase.READY and self._shows_example:
                self._write(self._example(boot))
            if boot.phase not in BOOT_PHASES:
                self._ended.set()

    def _tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            boot = self._ledger.snapshot()
            with self._lock:
                if not self._ended.is_set() and boot.phase in BOOT_PHASES:
                    detail = reading(boot) if boot.phase is Phase.LOADING_WEIGHTS else ""
                    seconds = boot.seconds[boot.phase]
                    line = phase_line("…", boot.phase, seconds, detail or boot.message)
                    self._write(CLEAR_LINE + one_row(line, self._out))

    def _finish_lines(self, boot: BootSnapshot) -> None:
        lines = CLEAR_LINE
        for phase, seconds in boot.seconds.items():
            if phase is not boot.phase and phase not in self._shown:
                self._shown.add(phase)
                detail = reading(boot) if phase is Phase.LOADING_WEIGHTS else ""
                lines += phase_line("✓", phase, seconds, detail) + "\n"
        self._write(lines)

    def _write(self, text: str) -> None:
        """The output may be a pipe without a reader, or a full disk: the server goes on."""
        with suppress(OSError):
            self._out.write(text)
            self._out.flush()

    def _example(self, boot: BootSnapshot) -> str:
        host = "127.0.0.1" if self._config.host in ("0.0.0.0", "::") else self._config.host  # noqa: S104
        url = f"http://{f'[{host}]' if ':' in host else host}:{self._port}"
        body = {
            "model": self._config.served_model_name,
            "messages": [{"role": "user", "content": "What is a Kubernetes pod?"}],
            "stream": True,
        }
        return (
            f"Ready in {boot.total_seconds:.1f} s: {self._config.served_model_name} at {url}/v1\n\n"
            f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            f"    -d '{json.dumps(body)}'\n\n"
        )


def reading(boot: BootSnapshot) -> str:
    """`1.20 of 7.50 GiB, 1.10 GiB/s, 6 s left` while weights are read, `7.50 GiB, 1.10 GiB/s` after."""
    weights = boot.weights
    if weights is None or weights.bytes_per_second is None:
        return ""
    rate = f"{gibibytes(round(weights.bytes_per_second))}/s"
    if weights.done_bytes >= weights.total_bytes:
        return f"{gibibytes(weights.total_bytes)}, {rate}"
    left_seconds = (weights.total_bytes - weights.done_bytes) / weights.bytes_per_second
    return f"{gibibytes(weights.done_bytes)} of {gibibytes(weights.total_bytes)}, {rate}, {left_seconds:.0f} s left"


def phase_line(mark: str, phase: Phase, seconds: float, message: str) -> str:
    """`✓ LoadingWeights   0.4 s`."""
    return f"{mark} {phase.value:<16} {seconds:5.1f} s  {message}".rstrip()
