"""Start a compiled kernel through ctypes: what Triton does with a launcher that a C compiler builds at first use.

arguments   query, pool, .., window, scale, HEAD_DIM, ..      constants are part of the code and are left out
buffer      | address | address | .. | int32 | float |        one per variant, each at a multiple of its size
addresses   [ &buffer[0], &buffer[8], .. ]                    what cuLaunchKernel takes; two scratch pointers follow
"""

from __future__ import annotations

import ctypes
import struct
from threading import Lock
from typing import Any

from millstream_kernels.prebuilt.cuda_library import INVALID_CONTEXT, CudaLibrary

# Triton's types that an argument can have at run time, as `struct` packs them.
FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q",
    "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip
POINTER = "Q"
SCRATCH = 2  # pointers that Triton adds to every kernel: global scratch, profile scratch; ours have neither


class UnsupportedKernelError(ValueError):
    """A kernel that needs what this launcher does not do. The message names the kernel."""


class CtypesLauncher:
    """Triton's `launcher_cls`: one per compiled kernel. May be called by several threads."""

    def __init__(self, source: Any, metadata: Any, library: CudaLibrary) -> None:
        """Raises UnsupportedKernelError: clusters, scratch memory, tensor descriptors, tuples or 16-bit scalars."""
        name = source.name
        for option, plain in (("num_ctas", 1), ("launch_cooperative_grid", False), ("launch_pdl", False)):
            if getattr(metadata, option, plain) != plain:
                raise UnsupportedKernelError(f"{name}: launches with {option}={getattr(metadata, option)!r}")
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise UnsupportedKernelError(f"{name}: uses scratch memory")
        self._library = library
        self._threads = 32 * metadata.num_warps
        self._shared_bytes = metadata.shared
        kinds = list(source.signature.values())
        self._taken = tuple((place, _is_pointer(kind)) for place, kind in enumerate(kinds) if kind != "constexpr")
        formats = [_format(name, kinds[place]) for place, _ in self._taken] + [POINTER] * SCRATCH
        self._packed = struct.Struct("@" + "".join(formats))
        self._buffer = ctypes.create_string_buffer(max(1, self._packed.size))
        start = ctypes.addressof(self._buffer)
        places = [struct.calcsize("@" + "".join(formats[:at]) + f"0{formats[at]}") for at in range(len(formats))]
        self._addresses = (ctypes.c_void_p * len(places))(*(start + place for place in places))
        self._lock = Lock()

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        function: int,
        packed_metadata: object,
        launch_metadata: object,
        enter_hook: Any,
        exit_hook: Any,
        *arguments: Any,
    ) -> None:
        """Queue one launch on `stream`. An empty grid does nothing, as with Triton's launcher.

        Raises:
            CudaError: the driver refuses the launch.
        """
        if enter_hook is not None:
            enter_hook(launch_metadata)
        if grid_x and grid_y and grid_z:
            values = [
                arguments[place] if not is_pointer else _address(arguments[place]) for place, is_pointer in self._taken
            ]
            with self._lock:  # the buffer is read before cuLaunchKernel returns
                self._packed.pack_into(self._buffer, 0, *values, 0, 0)
                self._launch(function, grid_x, grid_y, grid_z, stream)
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def _launch(self, function: int, grid_x: int, grid_y: int, grid_z: int, stream: int) -> None:
        sizes = (grid_x, grid_y, grid_z, self._threads, 1, 1, self._shared_bytes)
        status = self._library.launch_kernel(function, *sizes, stream, self._addresses, None)
        if status == INVALID_CONTEXT:  # a thread that has called nothing of CUDA yet
            import torch

            self._library.use_primary_context(torch.cuda.current_device())
            status = self._library.launch_kernel(function, *sizes, stream, self._addresses, None)
        if status:
            self._library.check(status, "cuLaunchKernel")


def _is_pointer(kind: Any) -> bool:
    return isinstance(kind, str) and kind.startswith("*")


def _format(kernel: str, kind: Any) -> str:
    if _is_pointer(kind):
        return POINTER
    if not isinstance(kind, str) or kind not in FORMATS:
        raise UnsupportedKernelError(f"{kernel}: has an argument of type {kind!r}")
    return FORMATS[kind]


def _address(value: Any) -> int:
    """Of a tensor, an address, or None."""
    if value is None:
        return 0
    return value if isinstance(value, int) else int(value.data_ptr())
