"""The calls of CUDA's driver library that loading and starting a kernel takes, through ctypes: no compiler, no header.

The functions release Python's lock while they run. Numbers of attributes are those of `cuda.h` (CUDA Driver API).
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"
INVALID_CONTEXT = 201
SMALL_SHARED_BYTES = 48 << 10  # more of it has to be asked for

# CUdevice_attribute
WARP_SIZE, REGISTERS_PER_BLOCK, CLOCK_KHZ, MULTIPROCESSORS = 10, 12, 13, 16
MEMORY_CLOCK_KHZ, MEMORY_BUS_BITS, SHARED_BYTES_PER_BLOCK_OPTIN = 36, 37, 97
# CUfunction_attribute
MAX_THREADS_PER_BLOCK, STATIC_SHARED_BYTES, LOCAL_BYTES, REGISTERS, MAX_DYNAMIC_SHARED_BYTES = 0, 1, 3, 4, 8
PREFER_SHARED = 1  # CUfunc_cache

PROTOTYPES: dict[str, list[Any]] = {
    "cuCtxGetCurrent": [POINTER(c_void_p)],
    "cuCtxSetCurrent": [c_void_p],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuFuncGetAttribute": [POINTER(c_int), c_int, c_void_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuFuncSetCacheConfig": [c_void_p, c_int],
    # function, grid (3), block (3), shared bytes, stream, addresses of the arguments, extra
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
}


class CudaError(RuntimeError):
    """A call of the driver library failed. The message has the call and CUDA's name of the error."""


class CudaLibrary:
    """`functions`: an object with the functions of PROTOTYPES as attributes; `libcuda.so.1` by default."""

    def __init__(self, functions: Any = None) -> None:
        """Raises CudaError: there is no CUDA driver on this machine."""
        if functions is None:
            try:
                functions = ctypes.CDLL(LIBRARY)
            except OSError as error:
                raise CudaError(f"{LIBRARY} cannot be loaded: {error}") from None
        self._functions = functions
        for name, arguments in PROTOTYPES.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = arguments, c_int
        self.launch_kernel = functions.cuLaunchKernel  # without `call`: it is on the path of every step

    def call(self, name: str, *arguments: Any) -> None:
        """Raises CudaError unless the call succeeds."""
        self.check(getattr(self._functions, name)(*arguments), name)

    def check(self, status: int, name: str) -> None:
        """Raises CudaError unless `status`, of the call `name`, is success."""
        if status:
            text = c_char_p()
            self._functions.cuGetErrorName(status, byref(text))
            raise CudaError(f"{name} failed: {(text.value or b'unknown error').decode()} ({status})")

    def use_primary_context(self, device: int) -> None:
        """Make the device's context, which torch uses too, that of this thread, unless the thread has one."""
        context = c_void_p()
        self.call("cuCtxGetCurrent", byref(context))
        if not context.value:
            self.call("cuDevicePrimaryCtxRetain", byref(context), device)
            self.call("cuCtxSetCurrent", context)

    def device_attribute(self, attribute: int, device: int) -> int:
        """One of CUdevice_attribute."""
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), attribute, device)
        return value.value

    def function_attribute(self, attribute: int, function: c_void_p) -> int:
        """One of CUfunction_attribute."""
        value = c_int()
        self.call("cuFuncGetAttribute", byref(value), attribute, function)
        return value.value


class CudaUtils:
    """What Triton asks of a driver's `utils`, with the signatures of its own `cuda_utils`."""

    def __init__(self, library: CudaLibrary) -> None:
        self._library = library

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Sizes and clocks; clocks in kHz."""
        attributes = {
            "max_shared_mem": SHARED_BYTES_PER_BLOCK_OPTIN,
            "max_num_regs": REGISTERS_PER_BLOCK,
            "multiprocessor_count": MULTIPROCESSORS,
            "warpSize": WARP_SIZE,
            "sm_clock_rate": CLOCK_KHZ,
            "mem_clock_rate": MEMORY_CLOCK_KHZ,
            "mem_bus_width": MEMORY_BUS_BITS,
        }
        return {name: self._library.device_attribute(number, device) for name, number in attributes.items()}

    def load_binary(self, name: str, cubin: bytes, shared_bytes: int, device: int) -> tuple[int, int, int, int, int]:
        """Load a kernel: its module, function, registers, spilled registers, and the threads that a block may have.

        Raises:
            CudaError: the driver refuses it.
        """
        library, module, function = self._library, c_void_p(), c_void_p()
        library.use_primary_context(device)
        library.call("cuModuleLoadData", byref(module), cubin)
        library.call("cuModuleGetFunction", byref(function), module, name.encode())
        registers, local_bytes, threads = (
            library.function_attribute(one, function) for one in (REGISTERS, LOCAL_BYTES, MAX_THREADS_PER_BLOCK)
        )
        if shared_bytes > SMALL_SHARED_BYTES:
            library.call("cuFuncSetCacheConfig", function, PREFER_SHARED)
            available = library.device_attribute(SHARED_BYTES_PER_BLOCK_OPTIN, device)
            dynamic = available - library.function_attribute(STATIC_SHARED_BYTES, function)
            library.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_BYTES, dynamic)
        return module.value or 0, function.value or 0, registers, local_bytes // 4, threads
