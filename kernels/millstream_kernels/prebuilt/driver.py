"""Triton's driver for NVIDIA GPUs, without the two modules in C that Triton's own compiles at first use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from triton.backends.nvidia.driver import CudaDriver

from millstream_kernels.prebuilt.cuda_library import CudaLibrary, CudaUtils
from millstream_kernels.prebuilt.key import compiled_for, target_of
from millstream_kernels.prebuilt.launcher import CtypesLauncher


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """Where torch computes at the moment. torch's own by default."""

    current_device: Any = torch.cuda.current_device
    capability: Any = torch.cuda.get_device_capability  # of a device: (major, minor)

    def current_stream(self, device: int) -> int:
        """The address of the stream that torch queues work on."""
        return int(torch._C._cuda_getCurrentRawStream(device))


class PrebuiltDriver(CudaDriver):  # type: ignore[misc]  # triton has no types
    """`triton.runtime.driver.set_active` takes it."""

    def __init__(self, library: CudaLibrary, device: CudaDevice) -> None:
        # Not super().__init__(): that builds what is replaced here.
        self.utils = CudaUtils(library)
        self.launcher_cls = partial(CtypesLauncher, library=library)
        self.get_device_capability = device.capability
        self.get_current_stream = device.current_stream
        self.get_current_device = device.current_device
        self.set_current_device = torch.cuda.set_device

    def get_current_target(self) -> Any:
        """The GPU whose code is looked up: sm_80 for all of 8.x."""
        major, minor = self.get_device_capability(self.get_current_device())
        capability = 10 * major + minor
        return target_of(compiled_for(capability) or capability)
