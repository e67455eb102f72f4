"""The build hook of hatchling that compiles the kernels for a CPU into a wheel, so that `pip install .` brings them.

numba is installed for the build alone, by pip or uv, and only where the code can be compiled and run: Linux on x86-64
with glibc, for which numba has wheels. Elsewhere a wheel has no compiled kernels, and the runtime computes with torch.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CpuKernels(BuildHookInterface[Any]):
    """Runs `hack.kernels.prebuild_cpu` before a wheel's files are collected, also before an editable installation."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """numba, with the version that the extra `dev` pins."""
        pins: list[str] = self.metadata.core.optional_dependencies["dev"]
        return [pin for pin in pins if pin.startswith("numba==")] if can_compile() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless the folder holds what the sources become.

        Raises:
            RuntimeError: the compiler failed, or numba is not installed (a build without isolation).
        """
        if not can_compile():
            self.app.display_warning(
                "The kernels for a CPU are compiled on Linux with glibc on x86-64 only: without them."
            )
            return
        root = Path(self.root)
        # pip passes the packages of its isolated environment in this variable, so they have to stay in it.
        paths = [str(root / "kernels"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "hack.kernels.prebuild_cpu"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            raise RuntimeError(
                f"The kernels for a CPU could not be compiled: {ended.stderr.strip()[-2000:]}\n"
                f"A build without isolation needs these packages: {', '.join(self.dependencies())}."
            )
        if ended.stdout:
            self.app.display_info(ended.stdout.strip())


def can_compile() -> bool:
    """Whether numba has a wheel for this machine, and the code can run here."""
    return (platform.system(), platform.machine(), platform.libc_ver()[0]) == ("Linux", "x86_64", "glibc")
