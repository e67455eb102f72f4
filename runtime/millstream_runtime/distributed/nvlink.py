"""Whether two GPUs are joined by NVLink, as NVIDIA's management library reports. None where it is not there to ask.

By ctypes on the driver's own `libnvidia-ml.so.1`, which the container toolkit mounts into every GPU pod: three calls do
not need a package.
"""

from __future__ import annotations

import ctypes

SUCCESS = 0
P2P_CAPS_INDEX_NVLINK = 2  # nvmlGpuP2PCapsIndex_t
P2P_STATUS_OK = 0  # nvmlGpuP2PStatus_t


def all_joined(uuids: list[str]) -> bool | None:
    """Whether NVLink joins every pair of these GPUs (`GPU-…`)."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if library.nvmlInit_v2() != SUCCESS:
        return None
    try:
        return _every_pair(library, uuids)
    finally:
        library.nvmlShutdown()


def _every_pair(library: ctypes.CDLL, uuids: list[str]) -> bool | None:
    devices = []
    for uuid in uuids:
        device = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) != SUCCESS:
            return None
        devices.append(device)
    for index, one in enumerate(devices):
        for other in devices[index + 1 :]:
            status = ctypes.c_int()
            asked = library.nvmlDeviceGetP2PStatus(one, other, P2P_CAPS_INDEX_NVLINK, ctypes.byref(status))
            if asked != SUCCESS:
                return None
            if status.value != P2P_STATUS_OK:
                return False
    return True
