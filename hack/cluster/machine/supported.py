"""Refuse a machine that cannot carry the local cluster, before anything is installed (`make supported`).

Run by `make` as a plain script with whatever Python the machine has, so it uses nothing that is newer than Python 3.7.
"""

from __future__ import annotations

import os
import platform
import sys

TRY = "MILLSTREAM_UNSUPPORTED_MACHINE"


def problem(system: str, machine: str, version: tuple[int, int]) -> str:
    """Return one sentence with what is supported, or an empty text for a machine that is."""
    if system != "Linux" or machine not in ("x86_64", "AMD64", "amd64"):
        found = f"{system or 'an unknown system'} on {machine or 'an unknown processor'}"
        return (
            f"The local cluster and the images are built for Linux on x86_64, and this is {found}: use a Linux machine "
            "or a virtual one, or install the chart in a cluster that you have (docs/install.md). "
            f"{TRY}=Try tries all the same."
        )
    if version < (3, 11):
        return (
            f"Python 3.11 or newer is needed, and `{sys.executable}` is {version[0]}.{version[1]}: install it and name "
            "it, as in `make demo PYTHON=python3.11`."
        )
    return ""


def main() -> int:
    """Print the problem, if there is one. Return the exit status."""
    said = "" if os.environ.get(TRY) == "Try" else problem(platform.system(), platform.machine(), sys.version_info[:2])
    if said:
        print(said, file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
