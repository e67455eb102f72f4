"""What this process may use: memory and CPUs, as the container's limits say, not as the machine's size says."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
RUNNING_CODE_BYTES = 80 << 20  # of mapped files: what steps read again and again


def memory_limit_bytes(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """The container's memory limit (cgroup v2, then v1), or the machine's memory where that is less."""
    container_bytes = container_limit_bytes(cgroup, meminfo)
    return _machine_bytes(meminfo) if container_bytes is None else container_bytes


def container_limit_bytes(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """The container's memory limit; None where it has none below the machine's memory, which others use too."""
    limits = [_integer(cgroup / "memory.max"), _integer(cgroup / "memory" / "memory.limit_in_bytes")]
    least = min((limit for limit in limits if limit is not None), default=None)
    return least if least is not None and least < _machine_bytes(meminfo) else None


def resident_bytes(status: Path = Path("/proc/self/statm")) -> int:
    """Memory that this process occupies now."""
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def claimed_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Memory of this process that the kernel cannot take back, and the code that it runs all the time.

    torch maps some 280 MiB of libraries. The kernel drops such pages before it kills for want of memory, and most of
    them are run once, while the process starts: counted whole, they took the room that plans promise the KV pool.
    """
    kinds = {"RssAnon:": 0, "RssFile:": 0, "RssShmem:": 0}
    for line in status.read_text().splitlines():
        words = line.split()
        if words and words[0] in kinds:
            kinds[words[0]] = int(words[1]) << 10
    return kinds["RssAnon:"] + kinds["RssShmem:"] + min(kinds["RssFile:"], RUNNING_CODE_BYTES)


def usable_cpus(cgroup: Path = _CGROUP) -> int:
    """CPUs this process may use: its affinity, cut to the container's quota (cgroup v2, then v1), at least one.

    torch counts the machine's cores; with more threads than quota, each parallel step waits for a throttled one.
    """
    cpus = float(len(os.sched_getaffinity(0)))
    quota = _quota_v2(cgroup / "cpu.max") or _quota_v1(cgroup / "cpu")
    return max(1, math.ceil(min(cpus, quota)) if quota else int(cpus))


def oom_kills(cgroup: Path = _CGROUP) -> int:
    """How many processes of this container the kernel has killed for want of memory (cgroup v2, then v1)."""
    for path in (cgroup / "memory.events", cgroup / "memory" / "memory.oom_control"):
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return 0


def _machine_bytes(meminfo: Path) -> int:
    return next(int(line.split()[1]) << 10 for line in meminfo.read_text().splitlines() if line.startswith("MemTotal:"))


def _quota_v2(path: Path) -> float | None:
    try:
        quota, period = path.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _integer(folder / "cpu.cfs_quota_us"), _integer(folder / "cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _integer(path: Path) -> int | None:
    """The number in a cgroup file; None where the file is absent or says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
