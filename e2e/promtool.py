"""Prometheus' own `promtool`: the one on the machine, or Debian's, unpacked into the cache and installed nowhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hack.cluster import paths
from hack.cluster.apt import family


def promtool() -> Path:
    """Path of a `promtool`; skips the test where there is none and none can be had."""
    if (own := shutil.which("promtool")) is not None:
        return Path(own)
    home = paths.subfolder("tools") / "debian-prometheus"
    found = home / "usr" / "bin" / "promtool"
    if not found.is_file():
        release = Path("/etc/os-release")
        if os.geteuid() != 0 or "debian" not in (family(release.read_text()) if release.is_file() else set()):
            pytest.skip("no promtool: install the package `prometheus` of your distribution")
        _unpack(home)
    return found


def _unpack(home: Path) -> None:
    """Download Debian's package with apt, which checks its signature, and unpack it."""
    fresh = paths.subfolder("tmp") / f"debian-prometheus.{os.getpid()}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", "prometheus"]
        if subprocess.run(command, cwd=fresh, capture_output=True, check=False).returncode != 0:
            subprocess.run(["apt-get", "update"], capture_output=True, check=False)
            done = subprocess.run(command, cwd=fresh, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"no promtool: apt-get download prometheus: {done.stderr.strip()[-200:]}")
        (package,) = fresh.glob("*.deb")
        subprocess.run(["dpkg", "-x", package, fresh / "unpacked"], check=True)
        shutil.rmtree(home, ignore_errors=True)
        (fresh / "unpacked").rename(home)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
