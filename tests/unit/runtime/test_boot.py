"""The boot ledger records where the time went, and the progress output shows it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import suppress

import pytest

from millstream.boot_progress import BootProgress
from millstream_runtime.boot import BootLedger, BootSnapshot, Phase, measure_process_age_seconds
from millstream_runtime.config import RuntimeConfig

CONFIG = RuntimeConfig(model="/m", served_model_name="tiny", host="0.0.0.0")  # noqa: S104


def test_seconds_of_closed_phases_stand_still_and_the_running_one_counts() -> None:
    ledger = BootLedger(process_age_seconds=5.0)
    assert ledger.snapshot().seconds[Phase.STARTING] >= 5.0
    ledger.enter("LoadingWeights", "Reading.")
    first = ledger.snapshot()
    assert (first.phase, first.message) == (Phase.LOADING_WEIGHTS, "Reading.")
    assert ledger.snapshot().seconds[Phase.STARTING] == first.seconds[Phase.STARTING]
    assert ledger.snapshot().seconds[Phase.LOADING_WEIGHTS] >= first.seconds[Phase.LOADING_WEIGHTS]
    ledger.enter(Phase.READY)
    total = ledger.snapshot().total_seconds
    assert ledger.snapshot().total_seconds == total  # serving is not booting
    assert list(ledger.snapshot().seconds) == [Phase.STARTING, Phase.LOADING_WEIGHTS]


def test_a_failed_process_stays_failed_and_a_draining_one_never_becomes_ready() -> None:
    ledger = BootLedger(0.0)
    ledger.enter(Phase.DRAINING)
    ledger.enter(Phase.READY)
    assert ledger.snapshot().phase is Phase.DRAINING
    ledger.enter(Phase.FAILED, "why")
    ledger.enter(Phase.READY)
    assert (ledger.snapshot().phase, ledger.snapshot().message) == (Phase.FAILED, "why")


def test_observers_hear_every_change() -> None:
    heard: list[BootSnapshot] = []
    ledger = BootLedger(0.0)
    ledger.subscribe(heard.append)
    for phase in (Phase.LOADING_WEIGHTS, Phase.READY):
        ledger.enter(phase)
    assert [snapshot.phase for snapshot in heard] == [Phase.LOADING_WEIGHTS, Phase.READY]


def test_the_age_of_a_process_includes_the_start_of_the_interpreter() -> None:
    program = (
        "import time; time.sleep(0.3); from millstream_runtime.boot import *; print(measure_process_age_seconds())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0.25
    assert measure_process_age_seconds() > 0.0


def test_the_view_ends_with_an_address_and_a_request_to_paste() -> None:
    for live in (False, True):
        ledger, out = BootLedger(0.0), io.StringIO()
        view = BootProgress(ledger, CONFIG, 8123, out, live=live)
        for phase in (Phase.LOADING_WEIGHTS, Phase.WARMING_UP, Phase.READY):
            ledger.enter(phase)
        view.close()
        text = out.getvalue()
        assert "curl -N http://127.0.0.1:8123/v1/chat/completions" in text
        assert '"model": "tiny"' in text
        assert ("✓ LoadingWeights" in text) is live
        assert ("\x1b" in text) is live


@pytest.mark.parametrize("live", [False, True])
def test_an_output_that_nobody_reads_any_more_ends_no_boot(live: bool) -> None:
    """As of `millstream serve … 2>&1 | head`: what follows the ledger runs where the engine's events are read."""
    reader, writer = os.pipe()
    os.close(reader)
    ledger, seen = BootLedger(0.0), list[Phase]()
    with open(writer, "w", encoding="utf-8") as out:  # noqa: PTH123 - a descriptor
        view = BootProgress(ledger, CONFIG, 8123, out, live=live)
        ledger.subscribe(lambda boot: seen.append(boot.phase))
        for phase in (Phase.LOADING_WEIGHTS, Phase.READY, Phase.DRAINING):
            ledger.enter(phase)
        view.close()
        with suppress(BrokenPipeError):
            out.flush()  # what is left in the buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
    assert seen == [Phase.LOADING_WEIGHTS, Phase.READY, Phase.DRAINING]


def test_the_view_of_a_failed_boot_promises_nothing() -> None:
    ledger, out = BootLedger(0.0), io.StringIO()
    view = BootProgress(ledger, CONFIG, 8123, out, live=False)
    ledger.enter(Phase.FAILED, "broken")
    view.close()
    assert out.getvalue() == ""
