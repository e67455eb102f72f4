"""Which policy serves which device: the only module that imports `engine.cpu`."""

from __future__ import annotations

import torch

from millstream_runtime.engine import gpu_warm_up
from millstream_runtime.engine.cpu.policy import CpuPolicy
from millstream_runtime.engine.device_policy import AcceleratorPolicy, DevicePolicy


def device_policy_for(device: torch.device, num_ranks: int) -> DevicePolicy:
    """Return the policy of `device`, of which `num_ranks` processes take an equal share."""
    return CpuPolicy(num_ranks) if device.type == "cpu" else AcceleratorPolicy(device, num_ranks, gpu_warm_up.run)
