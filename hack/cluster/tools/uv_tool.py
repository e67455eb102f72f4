"""uv, the one Python tool: from PyPI, pinned by hash in requirements/bootstrap.txt, linked as `.tools/bin/uv`."""

from __future__ import annotations

from pathlib import Path

from hack.cluster import content, paths
from hack.cluster.steps import Steps
from hack.cluster.tools import go_toolchain


def ensure(steps: Steps) -> Path:
    """Install uv into the cache if it is not there, and link it. Returns the link."""
    home = paths.subfolder("tools") / f"uv-{content.address_of({'lock': paths.BOOTSTRAP_LOCK.read_bytes()})}"
    if not (home / "bin" / "uv").is_file():
        with steps.step("Install uv from PyPI"):
            go_toolchain.pip_install(paths.BOOTSTRAP_LOCK, home, log="uv")
    return paths.link_tool(home / "bin" / "uv")
