"""A recorder without CUDA, for tests of graphs on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

from millstream_runtime.engine.execution.graphs.recorders import Recorded


class EagerRecorder:
    """No recording: a replay is another call. It shows on a CPU that buffers are refilled; nothing is frozen by it."""

    def record(self, compute: Callable[[], None]) -> Recorded:
        began = time.perf_counter()
        compute()
        return Recorded(compute, time.perf_counter() - began, 0)
