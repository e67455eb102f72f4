"""What lives when the server gets Ready is never looked at again; garbage that comes later is still found."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from millstream_runtime.boot import BootLedger, Phase
from millstream_runtime.server.operations.garbage_collector import freeze_gc

pytestmark = pytest.mark.deep


@pytest.fixture(autouse=True)
def own_collector() -> Iterator[None]:
    gc.unfreeze()  # another test of this process may have settled, too
    yield
    gc.unfreeze()


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_only_ready_freezes() -> None:
    ledger = BootLedger(0.0)
    ledger.subscribe(freeze_gc)
    ledger.enter(Phase.LOADING_WEIGHTS)
    assert gc.get_freeze_count() == 0
    ledger.enter(Phase.READY)
    assert gc.get_freeze_count() > 1000, "modules and types at the least"


def test_garbage_that_comes_later_is_still_collected() -> None:
    ledger = BootLedger(0.0)
    ledger.subscribe(freeze_gc)
    ledger.enter(Phase.READY)
    gone = weakref.ref(Node())
    gc.collect()
    assert gone() is None


def test_a_program_that_embeds_the_server_keeps_its_own_collector() -> None:
    """`millstream serve` subscribes it, and not the library."""
    program = "import millstream_runtime.server.model_server, gc; print(gc.get_freeze_count())"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "0"
