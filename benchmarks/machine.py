"""The hardware and software a number was measured on: a result without it means nothing."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """CPU model, cores, load, and the versions that decide speed. No host names, no paths."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        pairs = (line.partition(":") for line in info.read_text().splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        name = fields.get("model name", platform.machine())
        return f"{name} (family {fields.get('cpu family')}, model {fields.get('model')})"
    return platform.processor() or platform.machine()
