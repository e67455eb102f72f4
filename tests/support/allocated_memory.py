"""What torch allocates on a CPU while something runs, kernels' own workspaces included."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that were allocated at one time and not before, by torch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [one for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"]
    held = most = 0
    for one in sorted(events, key=lambda event: event.start_ns()):
        held += one.nbytes()
        most = max(most, held)
    return most
