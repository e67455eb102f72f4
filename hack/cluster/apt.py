"""Installing Debian packages on the host, where that is ours to do: root on Debian or Ubuntu."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hack.cluster import shell
from hack.cluster.errors import ClusterError

QUIET = {"DEBIAN_FRONTEND": "noninteractive"}


def family(os_release: str) -> set[str]:
    """`{"ubuntu", "debian"}` from the text of /etc/os-release: its ID and everything in ID_LIKE."""
    words: set[str] = set()
    for line in os_release.splitlines():
        key, _, value = line.partition("=")
        if key in ("ID", "ID_LIKE"):
            words.update(value.strip().strip("\"'").split())
    return words


def install(packages: Sequence[str]) -> None:
    """Install packages that are missing, from the machine's own sources. Raises ClusterError naming them."""
    names = " ".join(packages)
    release = Path("/etc/os-release")
    known = family(release.read_text()) if release.is_file() else set()
    if os.geteuid() != 0 or "debian" not in known:
        raise ClusterError(f"Please install `{names}` (this only does it itself as root on Debian or Ubuntu).")
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    try:
        shell.run(command, env=QUIET, log="apt-install")
    except ClusterError:  # most often: package lists that are missing or old
        shell.run(["apt-get", "update"], env=QUIET, log="apt-update")
        shell.run(command, env=QUIET, log="apt-install")
