"""Which errors mean that there was no memory for a step. No torch: the engine's loop asks too."""

from __future__ import annotations

_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",  # a RuntimeError of torch on a CPU
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "could not create a memory object",  # oneDNN
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short; the engine can go on with less to compute."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's own class
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)
