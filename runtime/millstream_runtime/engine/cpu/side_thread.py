"""A second thread that computes next to the engine's thread, on cores of its own.

    engine's thread   [ step of decodes ][ step of decodes ][ step of decodes ][ step: chunk done ]
    side thread       [ a prompt's chunk, layer after layer ..................]

A decode waits for memory and a prompt for arithmetic, so the two share a machine well. One after the other on all
cores, each step of decodes would be longer by the part of the prompt that it shares.

torch computes without the interpreter's lock, and its number of threads is a setting of the calling thread. The side
thread has a lower priority: where other processes want its core, the prompt waits and not the answers.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

import torch

NICENESS = 5


class SideThread:
    """Runs one job at a time: calls it repeatedly until it returns False or `stop` is called.

    All methods are called by the same thread.
    """

    def __init__(self, num_threads: int) -> None:
        """`num_threads`: threads that torch computes a job with."""
        self.num_threads = num_threads
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], bool]) -> None:
        """Call `job` on the thread until it returns False. Stops the job before."""
        self.stop()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, args=(job,), name="side-thread", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait until the current call of the job returns; it is not called again. Raises what the job raised."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], bool]) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a system whose threads have one priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            torch.set_num_threads(self.num_threads)
            with torch.inference_mode():
                while not self._stopping and job():
                    pass
        except BaseException as error:  # raised by `stop`
            self._error = error
