"""malloc settings that keep what a step frees for the next step; and what is freed before, given back.

glibc gives large blocks back to the kernel as soon as they are free. The activations of a prompt's chunk are such
blocks, freed and allocated again in every layer, and the kernel zeroes the pages that it hands out, one fault per
4 KiB. Whether that happens depends on what else lies in the heap: in two processes of three, a prompt of 2,000 tokens
through 135 M parameters meant 390,000 faults and 0.9 seconds of a processor (`benchmarks/freed_memory.py`). Other
servers preload another allocator for this; here two settings do it.

The process then keeps its peak memory, for which its limit must have room anyway.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MOST_BYTES = (1 << 31) - 1  # mallopt takes an int


def keep_freed_memory() -> bool:
    """Keep freed blocks below 2 GiB in this process. False where the C library has no such setting (musl, macOS).

    Called once weights and KV pool are allocated: these come from the kernel directly, and go back to it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = [mallopt(setting, _MOST_BYTES) for setting in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD)]
    return done == [1, 1]


def give_back_freed_memory() -> None:
    """Return freed pages to the kernel, where the C library can: what the boot takes for a moment is the pool's."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
