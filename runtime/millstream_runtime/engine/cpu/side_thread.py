"""A second thread that computes beside the engine's own, on cores of its own.

    engine's thread   [ step of decodes ][ step of decodes ][ step of decodes ][ step: chunk done ]
    side thread       [ a prompt's chunk, layer after layer ..................]

A decode waits for memory and a prompt for arithmetic, so that the two share a machine well. One after the other on all
cores, each step of decodes would be longer by whatever of the prompt shares it.

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
    """Runs one job at a time: called again and again until it says that it is done, or somebody stops it.

    All methods are for one and the same thread.
    """

    def __init__(self, num_threads: int) -> None:
        """`num_threads`: what torch computes a job with."""
        self.num_threads = num_threads
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job goes on."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], bool]) -> None:
        """Have `job` called until it returns False. The job before is over."""
        self.stop()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, args=(job,), name="side-thread", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait until the job is over: it is not called again. Raises what it raised."""
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
        except BaseException as error:  # for the thread that waits
            self._error = error
