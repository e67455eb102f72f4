"""The compiled kernels of the runtime image: made by `hack.kernels.prebuild`, when a kernel or Triton changed.

The code is the same whatever Python runs it, so this machine's compiles for the image's. Triton has wheels for x86-64
alone: elsewhere the folder is empty, and the runtime, which has no Triton there either, computes with torch.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hack.images.errors import ImageError
from hack.images.layer import Entry, content_hash, entries_below

MACHINE = "x86_64"
KERNELS = "kernels/millstream_kernels"
_TRITON = re.compile(r"^triton==\S+", re.MULTILINE)


def input_hash(checkout: Path, lock: str) -> str:
    """What the folder depends on: the kernels, what compiles them, Triton's version in the image, the machine."""
    sources = []
    for folder in (KERNELS, "hack/kernels"):
        endings = (".py", ".json") if folder == KERNELS else (".py",)  # tuning tables choose the variants
        sources += [
            Entry(f"{folder}/{entry.name}", entry.path)
            for entry in entries_below(checkout / folder)
            if entry.name.endswith(endings)
        ]
    pinned = _TRITON.search(lock)
    facts = (content_hash(sources), pinned[0] if pinned else "", platform.machine())
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def stage(checkout: Path) -> Callable[[Path, str], list[Entry]]:
    """How the folder is made; see `contexts.Tree`."""

    def make(folder: Path, _target: str) -> list[Entry]:
        out = folder / "kernels"
        if platform.machine() == MACHINE:
            _prebuild(checkout, out)
        else:
            out.mkdir(parents=True)
            (out / "index.json").write_text(json.dumps({"format": 1, "triton": "", "entries": []}))
        return entries_below(out)

    return make


def _prebuild(checkout: Path, out: Path) -> None:
    command = [sys.executable, "-m", "hack.kernels.prebuild", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=checkout)
    if done.returncode:
        raise ImageError(f"The kernels could not be compiled: {(done.stderr or done.stdout).strip()[-600:]}")
