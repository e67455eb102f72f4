"""A real engine whose steps wait for a gate, so that a test decides when work goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.request import TokenOutput
from millstream_runtime.engine_process.loop import EngineLike, OnPhase, load_engine


class SlowSteps:
    """Give `make` to `serving`; clear `gate` to hold every step back, set `fail_with` to end the engine.

    With `steps_left` the engine clears the gate itself, after that number of steps: an answer cannot end before a test
    looks at it, however long the test waits for a processor.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fail_with: BaseException | None = None
        self.steps_left: int | None = None

    def make(self, config: RuntimeConfig, on_phase: OnPhase) -> EngineLike:
        self.engine = load_engine(config, on_phase)
        step = self.engine.step

        def gated() -> Sequence[TokenOutput]:
            self.gate.wait(60)
            if self.fail_with is not None:
                raise self.fail_with
            if self.steps_left is not None:
                self.steps_left -= 1
                if not self.steps_left:
                    self.gate.clear()
            return step()

        self.engine.step = gated  # type: ignore[method-assign]
        return self.engine
