"""The steps that a CPU runs before the first request, after those of every device.

one rank     decodes timed on fewer and on all threads (`threads`)
always       decodes of every number of requests: oneDNN writes machine code for each number of rows
             (`models.cpu.two_layouts`)
"""

from __future__ import annotations

import time

from millstream_runtime.engine.cpu import threads
from millstream_runtime.engine.device_policy import WarmUpSteps

MOST_DECODES = 16
# Of the engine's thread, not of the clock: another process that holds it up leaves no less to prepare. Where steps are
# so long that this ends early, first-time work is lost in them.
MOST_DECODES_SECONDS = 1.0


def measure_threads(steps: WarmUpSteps, all_threads: int) -> tuple[tuple[int, int], ...] | None:
    """Return the limits of `ThreadCounts`, from timed decodes; None where the pool has no room for them."""
    num_tokens = threads.most_steps(all_threads) + 2
    max_requests = steps.max_requests(num_tokens + 1)
    if not max_requests:
        return None
    limits = []
    for most_tokens, num_decodes in threads.MEASURED_TOKENS.items():
        with steps.decodes([num_tokens] * min(num_decodes, max_requests)):
            steps.step()
            seconds = threads.measure(steps.step, all_threads)
        limits.append((most_tokens, threads.choose(seconds, all_threads)))
    return tuple(limits)


def run_decodes_of_every_number(steps: WarmUpSteps) -> None:
    """Requests of which one ends at each step: 16 decodes, 15, 14, ..., 1."""
    end = time.thread_time() + MOST_DECODES_SECONDS
    max_requests = steps.max_requests(MOST_DECODES + 2)
    with steps.decodes([2 + number for number in range(min(MOST_DECODES, max_requests))]):
        while steps.has_work() and time.thread_time() < end:
            steps.step()
