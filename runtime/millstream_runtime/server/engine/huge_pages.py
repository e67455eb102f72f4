"""The environment of an engine process whose weights lie in huge pages on a CPU.

A product of few rows reads each weight once, and with pages of 4 KiB it waits for their addresses again and again.
glibc asks the kernel for huge pages for what malloc takes, if GLIBC_TUNABLES says so when the process starts (2.35 and
later; older ones ignore it). It has an effect where the kernel's rule is `madvise`: with `always` the kernel gives huge
pages unasked, with `never` there are none. The KV pool asks for small pages (`engine.cpu.pages`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from millstream_runtime.config import Device

RULE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
VARIABLE, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def engine_environment(environment: Mapping[str, str], device: Device, rule: Path | None = None) -> dict[str, str]:
    """Return `environment` with the tunable, unless the device is a GPU, it has no effect, or a user has set it.

    `rule`: the kernel's file, as `always [madvise] never`; by default RULE. Other tunables of the user stay.
    """
    tunables = [one for one in environment.get(VARIABLE, "").split(":") if one]
    is_set = any(one.split("=", 1)[0] == TUNABLE for one in tunables)
    if is_set or device is Device.CUDA or not _is_glibc() or not _is_by_request(rule or RULE):
        return dict(environment)
    return {**environment, VARIABLE: ":".join([*tunables, f"{TUNABLE}=1"])}


def _is_by_request(rule: Path) -> bool:
    try:
        return "[madvise]" in rule.read_text(encoding="ascii")
    except (OSError, ValueError):
        return False  # no Linux, or a kernel without huge pages


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, OSError, ValueError):
        return False  # musl, macOS
