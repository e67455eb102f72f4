"""The command of another Python process of ours."""

from __future__ import annotations

import sys

# -I: neither PYTHON* variables nor the working folder or the user's packages decide what is imported. It ignores
# PYTHONDONTWRITEBYTECODE and PYTHONUNBUFFERED too, hence -B and -u.
ISOLATED = ("-I", "-B", "-u")


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `module`, isolated where this process is, as every one of the image.

    In a checkout a process may have been started with PYTHONPATH, and then its children import the same code.
    """
    return [sys.executable, *(ISOLATED if sys.flags.isolated else ()), "-m", module, *arguments]
