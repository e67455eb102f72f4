"""Chunks of long prompts on the side thread: all layers, one after another, while the engine's thread decodes."""

from __future__ import annotations

from functools import partial

from millstream_runtime.engine.cpu import threads
from millstream_runtime.engine.cpu.side_thread import SideThread
from millstream_runtime.engine.device_policy import LayerwiseRunner
from millstream_runtime.engine.scheduling.scheduler import Chunk


class ThreadedPrefill:
    """See `chunked_prefill.SidePrefill`."""

    def __init__(self, runner: LayerwiseRunner, thread: SideThread) -> None:
        self._runner = runner
        self.thread = thread

    @property
    def is_busy(self) -> bool:
        return self.thread.is_busy

    def start(self, chunks: list[Chunk]) -> None:
        layers = self._runner.begin_layers(chunks, partial(threads.reading, all_threads=self.thread.num_threads))

        def compute_layer() -> bool:
            return not layers.advance(layers.num_done_layers + 1)

        self.thread.start(compute_layer)  # after which nothing else touches `layers` until `stop`

    def stop(self) -> None:
        self.thread.stop()
