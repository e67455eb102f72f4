"""The hardware and software a number was measured on: a result without it means nothing."""

from __future__ import annotations

from typing import Any

import torch

from millstream.bench.environment import this_machine


def describe() -> dict[str, Any]:
    """CPU and GPU models, cores, load, and the versions that decide speed. No host names, no paths."""
    described = {**this_machine(), "torch_threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        described |= {"cuda_device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return described
