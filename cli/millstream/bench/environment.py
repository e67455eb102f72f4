"""The hardware and software of this machine, for the report. No host names, no paths."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("millstream", "torch", "transformers")


def this_machine() -> dict[str, Any]:
    """CPU and GPU models, cores this process may use, load before the run, versions. Loads nothing heavy."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": gpu_models(),
        "load_average_1_min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name)) is not None},
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name with family and model, which a cloud's generic name hides."""
    if cpuinfo.exists():
        pairs = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        name = fields.get("model name", platform.machine())
        return f"{name} (family {fields.get('cpu family')}, model {fields.get('model')})"
    return platform.processor() or platform.machine()


def gpu_models(folder: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """NVIDIA GPUs by the driver's own files: no process is started, no library is loaded."""
    names = []
    for information in sorted(folder.glob("*/information")):
        lines = information.read_text().splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
