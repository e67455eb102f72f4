"""A runc that leaves out the capabilities this machine may not give: one file, run for each container.

Some sandboxes and CI machines run without, say, CAP_SYS_RESOURCE in their bounding set. `docker run --privileged`
asks for all capabilities, so runc stops there with "unable to apply caps: operation not permitted", and a kind node
cannot start. The cure is small: before runc reads a container's `config.json` (or the process file of an exec), take
out the names that the kernel would refuse. Everything else goes to the real runc unchanged.

On a machine with a full bounding set nothing is missing and this file is never registered (see `docker_engine.py`).
This module imports nothing of ours: it is copied into the cache and started by containerd's shim with `python -I -S`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# Linux capability numbers, include/uapi/linux/capability.h; the index is the bit in /proc/<pid>/status.
CAPABILITIES = (
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
)

REAL_RUNC_PATHS = ("/usr/sbin/runc", "/usr/bin/runc", "/usr/local/sbin/runc", "/usr/local/bin/runc")


def missing_capabilities(proc_status: str, last_capability: int) -> list[str]:
    """Names (`CAP_SYS_RESOURCE`) that the kernel knows and the bounding set in `/proc/<pid>/status` lacks.

    A kernel newer than our table has numbers without a name; no container asks for those, so they are left out.
    """
    bounding = next((int(line.split()[1], 16) for line in proc_status.splitlines() if line.startswith("CapBnd:")), None)
    if bounding is None:
        return []
    known = CAPABILITIES[: last_capability + 1]
    return [f"CAP_{name}" for bit, name in enumerate(known) if not bounding >> bit & 1]


def missing_here() -> list[str]:
    """`missing_capabilities` of this process; empty where /proc does not tell (not Linux)."""
    try:
        status = Path("/proc/self/status").read_text()
        last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    except OSError:
        return []
    return missing_capabilities(status, last)


def without(process: dict[str, Any], names: list[str]) -> bool:
    """Take `names` out of every capability set of an OCI `process` object, in place. True if something was there."""
    changed = False
    for key, held in (process.get("capabilities") or {}).items():
        kept = [name for name in held or [] if name not in names]
        if held and len(kept) != len(held):
            process["capabilities"][key] = kept
            changed = True
    return changed


def file_to_rewrite(arguments: list[str], working_folder: Path) -> tuple[Path, bool] | None:
    """Which file of this runc call carries capabilities: (path, True for a whole bundle config), or None.

    `create`, `run` and `restore` read `<bundle>/config.json` (bundle defaults to the working folder); `exec` may be
    given its process as a file.
    """
    verbs = [word for word in arguments if word in ("create", "run", "restore", "exec")]
    if not verbs:
        return None
    if verbs[0] == "exec":
        process = _option(arguments, "--process", "-p")
        return (Path(process), False) if process else None
    bundle = _option(arguments, "--bundle", "-b") or working_folder
    return Path(bundle) / "config.json", True


def _option(arguments: list[str], long: str, short: str) -> str | None:
    for index, word in enumerate(arguments):
        if word in (long, short) and index + 1 < len(arguments):
            return arguments[index + 1]
        if word.startswith(long + "="):
            return word.split("=", 1)[1]
    return None


def rewrite(path: Path, is_bundle: bool, names: list[str]) -> None:
    """Drop `names` from the file, by a rename so that runc never reads half of it."""
    document = json.loads(path.read_text())
    if not without(document.get("process") or {} if is_bundle else document, names):
        return
    fresh = path.with_name(path.name + ".millstream")
    fresh.write_text(json.dumps(document))
    fresh.chmod(path.stat().st_mode & 0o777)
    fresh.replace(path)


def main() -> None:
    """Rewrite what this call needs, then become the real runc."""
    target = file_to_rewrite(sys.argv[1:], Path.cwd())
    names = missing_here()
    if target is not None and names and target[0].is_file():
        rewrite(*target, names)
    runc = next((path for path in REAL_RUNC_PATHS if os.access(path, os.X_OK)), None)
    if runc is None:
        sys.exit("runc wrapper: no runc in " + ", ".join(REAL_RUNC_PATHS))
    os.execv(runc, [runc, *sys.argv[1:]])  # noqa: S606  # no shell is the point


if __name__ == "__main__":
    main()
