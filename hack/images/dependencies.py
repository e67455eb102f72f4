"""The third-party packages of an image: from a hash-pinned lock to three folders that change at different speeds.

    requirements/runtime.txt --group()--> cuda    nvidia-*, cuda-*        2.8 GB, moves with torch
                                          torch   torch, triton           1.7 GB
                                          python  everything else         0.2 GB

uv installs each group on this side, by hard links from its cache: seconds, where an install inside a container would
fetch everything again. What is only there to build or test against is left out, and every module is compiled, because
a pod with a read-only root file system could not keep what it compiles.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

from hack.images.errors import ImageError
from hack.images.layer import Entry, entries_below

# Matched in order against a distribution's name; the last one takes the rest.
GROUPS = {"cuda": ("nvidia-*", "cuda-*"), "torch": ("torch", "triton"), "python": ("*",)}
# Console scripts start with this machine's interpreter; archives and tests serve those who build or test the package.
LEFT_OUT = ("bin/*", "*.a", "*/tests/*", ".lock", "__pycache__/*", "*.dist-info/RECORD", "*.dist-info/uv_*")
_FORMAT = 1  # raise when the rules in this file change what a layer holds

_PINNED = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==")


def group(lock: str) -> dict[str, str]:
    """The lock's text split by GROUPS: group name to the lines that pin its distributions, hashes included."""
    parts: dict[str, list[str]] = {name: [] for name in GROUPS}
    current: list[str] | None = None
    for line in lock.splitlines():
        if pinned := _PINNED.match(line):
            current = parts[_group_of(pinned[1])]
        if current is not None and line.strip() and not line.strip().startswith("#"):
            current.append(line.rstrip())
    return {name: "\n".join(lines) + "\n" for name, lines in parts.items() if lines}


def _group_of(distribution: str) -> str:
    return next(name for name, patterns in GROUPS.items() if any(fnmatch(distribution, p) for p in patterns))


def input_hash(pins: str, python_version: str) -> str:
    """What a group's files depend on, without making them: the pins, the interpreter, the machine, the rules here."""
    facts = (pins, python_version, platform.machine(), repr(LEFT_OUT), str(_FORMAT))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def install(pins: str, folder: Path, *, uv: Path, python_version: str) -> list[Entry]:
    """Install a group's pins below `folder` and name the files that belong in the image.

    Raises:
        ImageError: uv failed; carries the end of what it said.
    """
    folder.mkdir(parents=True)
    lock = folder.with_suffix(".txt")
    lock.write_text(pins)
    command = [str(uv), "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--python", sys.executable, "--python-version", python_version]
    command += ["--python-platform", f"{_machine()}-manylinux_2_28", "--target", str(folder), "-r", str(lock)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ImageError(f"uv could not install {', '.join(_names(pins)[:3])}, …: {done.stderr.strip()[-600:]}")
    for cache in folder.rglob("__pycache__"):
        shutil.rmtree(cache)
    return [entry for entry in entries_below(folder) if not any(fnmatch(entry.name, rule) for rule in LEFT_OUT)]


def compile_modules(folder: Path, target: str, *, python_version: str, base: str) -> None:
    """Write `__pycache__` next to every module below `folder`, which will be at `target` in the image.

    The files are never checked against their source again ("unchecked-hash"): in an image both are immutable.
    Bytecode belongs to one minor version of Python; when this interpreter is another one, the base image's is asked.
    """
    options = ["-m", "compileall", "-qq", "-j", str(os.cpu_count() or 1), "--invalidation-mode", "unchecked-hash"]
    if python_version == f"{sys.version_info.major}.{sys.version_info.minor}":
        command = [sys.executable, *options, "-s", str(folder), "-p", target, str(folder)]
    else:
        user = f"{os.getuid()}:{os.getgid()}"
        command = ["docker", "run", "--rm", "--network=none", f"--user={user}", f"--volume={folder}:{target}", base]
        command += ["python3", *options, target]
    # A module that does not compile (a template, another version's syntax) is left to fail where it is imported.
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode > 1:
        raise ImageError(f"Compiling the modules for {target} failed: {(done.stderr or done.stdout).strip()[-600:]}")


def _machine() -> str:
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())


def _names(pins: str) -> list[str]:
    return [pinned[1] for line in pins.splitlines() if (pinned := _PINNED.match(line))]
