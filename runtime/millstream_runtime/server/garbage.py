"""Python's cycle collector, told what it need not look at: modules, routes and schemas live as long as the process.

A request makes some hundreds of objects and no cycles that matter, so by default the collector runs for every one of
them, and every so often over the 60 MB that the imports left: tens of milliseconds in which no token leaves.
"""

from __future__ import annotations

import gc

from millstream_runtime.boot import BootSnapshot, Phase

ALLOCATIONS_A_RUN = 10_000  # net new objects; Python's own 700 is less than one request


def settle(boot: BootSnapshot) -> None:
    """For `BootLedger.subscribe`: when the server is Ready, what lives now is never looked at again."""
    if boot.phase is Phase.READY:
        gc.collect()
        gc.freeze()
        gc.set_threshold(ALLOCATIONS_A_RUN, *gc.get_threshold()[1:])
