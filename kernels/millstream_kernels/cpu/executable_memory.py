"""Whether this process may run machine code that it writes itself.

    systemd MemoryDenyWriteExecute=, prctl(PR_SET_MDWE)      mprotect fails
    SELinux without execmem, seccomp filters                 mprotect fails

LLVM places our kernels so, and does not look whether the last step failed: the first call would end the process. oneDNN
writes code for each product. So both are asked for only where a page of our own may become executable.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

PROT_READ, PROT_EXEC = 1, 4


@functools.cache
def refusal() -> str | None:
    """Return why memory that was written may not become executable; None: it may."""
    process = ctypes.CDLL(None, use_errno=True)
    process.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        first = ctypes.c_char.from_buffer(page)
        failed = process.mprotect(ctypes.addressof(first), mmap.PAGESIZE, PROT_READ | PROT_EXEC)
        problem = os.strerror(ctypes.get_errno()) if failed else None
        del first  # a mapping that is referred to cannot be closed
    return None if problem is None else f"memory that was written may not become executable here: {problem}"
