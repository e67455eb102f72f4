"""A fake of CUDA's driver library, for machines without a GPU: C functions that record launches and compute nothing.

It takes the place of `libcuda.so.1` itself, so what is in front of it, Triton's launch included, is the real one. Which
bytes of an argument a kernel reads is known from its machine code, not from who starts it.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any

from millstream_kernels.prebuilt.driver import CudaDevice

FAKE_CONTEXT = 0xC0DE
FAKE_STREAM = 0x57EA
SHARED_BYTES_OPTIN = 97  # CUdevice_attribute
MAX_THREADS_PER_BLOCK = 0  # CUfunction_attribute


@dataclass(frozen=True, slots=True)
class Launch:
    """What reached the driver."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    arguments: tuple[bytes, ...]  # as many, and of the sizes, as the machine code reads


class FakeCuda:
    """Give it to `CudaLibrary`. `launches` are in the order in which they came."""

    def __init__(self, shared_bytes: int = 227 << 10) -> None:
        self.launches: list[Launch] = []
        self.calls: list[str] = []
        self.fails: dict[str, list[int]] = {}  # call -> statuses that its next calls return
        self._shared_bytes = shared_bytes
        self._context = FAKE_CONTEXT
        self._modules: list[bytes] = []
        self._functions: list[tuple[str, list[int]]] = []
        pointer = POINTER(c_void_p)
        prototypes: dict[str, list[Any]] = {
            "cuCtxGetCurrent": [pointer],
            "cuCtxSetCurrent": [c_void_p],
            "cuDevicePrimaryCtxRetain": [pointer, c_int],
            "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
            "cuModuleLoadData": [pointer, c_void_p],
            "cuModuleGetFunction": [pointer, c_void_p, c_char_p],
            "cuFuncGetAttribute": [POINTER(c_int), c_int, c_void_p],
            "cuFuncSetAttribute": [c_void_p, c_int, c_int],
            "cuFuncSetCacheConfig": [c_void_p, c_int],
            "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, pointer, c_void_p],
            "cuGetErrorName": [c_int, POINTER(c_char_p)],
        }
        for name, arguments in prototypes.items():
            setattr(self, name, CFUNCTYPE(c_int, *arguments)(self._counted(name)))

    def _counted(self, name: str) -> Any:
        method = getattr(self, f"_{name}", lambda *_: 0)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if statuses := self.fails.get(name):
                return statuses.pop(0)
            return int(method(*arguments))

        return call

    def _cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context[0] = self._context
        return 0

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, _device: int) -> int:  # noqa: N802
        value[0] = self._shared_bytes if attribute == SHARED_BYTES_OPTIN else 32
        return 0

    def _cuModuleLoadData(self, module: Any, image: int) -> int:  # noqa: N802
        header = ctypes.string_at(image, 64)
        end_of_sections = (
            struct.unpack_from("<Q", header, 40)[0]
            + struct.unpack_from("<HH", header, 58)[0] * (struct.unpack_from("<H", header, 60)[0])
        )
        self._modules.append(ctypes.string_at(image, end_of_sections))
        module[0] = len(self._modules)
        return 0

    def _cuModuleGetFunction(self, function: Any, module: int, name: bytes) -> int:  # noqa: N802
        kernel = name.decode()
        self._functions.append((kernel, argument_sizes(self._modules[module - 1], kernel)))
        function[0] = len(self._functions)
        return 0

    def _cuFuncGetAttribute(self, value: Any, attribute: int, _function: int) -> int:  # noqa: N802
        value[0] = 1024 if attribute == MAX_THREADS_PER_BLOCK else 0
        return 0

    def _cuLaunchKernel(self, function: int, *rest: Any) -> int:  # noqa: N802
        sizes, (stream, addresses, _extra) = rest[:7], rest[7:]
        kernel, bytes_of_arguments = self._functions[function - 1]
        arguments = tuple(ctypes.string_at(addresses[place], size) for place, size in enumerate(bytes_of_arguments))
        grid, block = (sizes[0], sizes[1], sizes[2]), (sizes[3], sizes[4], sizes[5])
        self.launches.append(Launch(kernel, grid, block, sizes[6], stream or 0, arguments))
        return 0

    def _cuGetErrorName(self, _status: int, text: Any) -> int:  # noqa: N802
        text[0] = b"CUDA_ERROR_FAKE"
        return 0


def fake_device(capability: int) -> CudaDevice:
    """Device 0 of a fake GPU, 80 for sm_80."""

    class FakeDevice(CudaDevice):
        def current_stream(self, device: int) -> int:
            return FAKE_STREAM

    return FakeDevice(lambda: 0, lambda device: divmod(capability, 10))


def argument_sizes(cubin: bytes, kernel: str) -> list[int]:
    """Bytes of each argument that the machine code of `kernel` reads, in order (EIATTR_KPARAM_INFO of `.nv.info`)."""
    info = _section(cubin, f".nv.info.{kernel}")
    sizes: dict[int, int] = {}
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if (form, attribute) == (4, 0x17):
            _index, ordinal, _offset, flags = struct.unpack_from("<IHHI", info, at + 4)
            sizes[ordinal] = flags >> 18
        at += 4 + (size if form == 4 else 0)
    return [sizes[ordinal] for ordinal in sorted(sizes)]


def _section(cubin: bytes, wanted: str) -> bytes:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    width, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + width * place) for place in range(count)]
    names_at = sections[names][4]
    for name, _type, _flags, _address, offset, size in sections:
        start = names_at + name
        if cubin[start : cubin.index(b"\0", start)].decode() == wanted:
            return cubin[offset : offset + size]
    raise ValueError(f"the code has no section {wanted}")
