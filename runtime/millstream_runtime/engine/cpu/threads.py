"""How many threads a step computes with on a CPU: measured when the engine warms up, not assumed.

Waking a second thread costs some tens of microseconds per parallel region, and much more where another process wants
the core. A decode of a small model has hundreds of regions of about that length, so one thread may be quicker than two;
a prompt's chunk has few and long ones. So threads are measured at two sizes of step, and prompts take all of them.

    tokens of a step   1 ... FEW_TOKENS   ... SOME_TOKENS   more
    threads            measured at 1      measured at 16    all

Attention is different: what it reads grows with the context, and nothing else of a step does. So a call takes a thread
for each BYTES_PER_THREAD that it reads, whatever the step's other operations compute with.

`choose` is the decision, pure; `measure` runs steps. With several ranks each keeps its share of the cores as it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

FEW_TOKENS, SOME_TOKENS = 4, 32
MEASURED_TOKENS = {FEW_TOKENS: 1, SOME_TOKENS: 16}  # largest step: decodes of the step that is timed for it
BYTES_PER_THREAD = 512 << 10  # less is read before another thread is awake
LEAST_GAIN = 0.1  # fewer threads than all must be quicker by this share of the time
LEAST_SAMPLES, MOST_SAMPLES = 3, 7
BUDGET_SECONDS = 0.3  # for each size; a model whose steps are longer has work enough for all threads
_AS_IT_IS = nullcontext()


def reading(num_bytes: int, all_threads: int) -> AbstractContextManager[None]:
    """Compute what reads `num_bytes` of the KV pool with as many threads as that is worth, and no fewer than now."""
    wanted = min(all_threads, num_bytes // BYTES_PER_THREAD)
    if wanted <= 1 or wanted <= torch.get_num_threads():
        return _AS_IT_IS  # of most calls: a generator for each would take longer
    return _with_threads(wanted)


@contextmanager
def _with_threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def candidates(all_threads: int) -> list[int]:
    """Return the numbers of threads to try: all, one, and the powers of two between."""
    return [all_threads, *(1 << power for power in range(all_threads.bit_length()) if 1 << power < all_threads)]


def choose(seconds: Mapping[int, Sequence[float]], all_threads: int) -> int:
    """Return the quickest number of threads by the median of its `seconds`; all where none is clearly quicker."""
    if any(len(one) < LEAST_SAMPLES for one in seconds.values()):
        return all_threads
    medians = {threads: statistics.median(one) for threads, one in seconds.items()}
    best = min(medians, key=lambda threads: (medians[threads], -threads))
    return best if medians[best] < (1 - LEAST_GAIN) * medians[all_threads] else all_threads


def most_steps(all_threads: int) -> int:
    """Return how often `measure` calls its step at most."""
    return MOST_SAMPLES * len(candidates(all_threads))


def measure(
    step: Callable[[], object], all_threads: int, clock: Callable[[], float] = time.perf_counter
) -> dict[int, list[float]]:
    """Return seconds of `step` by number of threads, measured in turns: all see the same state of the machine.

    It ends after BUDGET_SECONDS, however few there are by then. torch has `all_threads` afterwards.
    """
    seconds: dict[int, list[float]] = {threads: [] for threads in candidates(all_threads)}
    end = clock() + BUDGET_SECONDS
    try:
        for _ in range(MOST_SAMPLES):
            for threads, samples in seconds.items():
                torch.set_num_threads(threads)
                began = clock()
                step()
                samples.append(clock() - began)
                if clock() > end:
                    return seconds
    finally:
        torch.set_num_threads(all_threads)
    return seconds
