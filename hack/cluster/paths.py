"""Where things live: the checkout's `.tools/` (links), and the user's cache shared by all clones (the heavy things).

.tools/bin/kind                     -> cache/tools/kind-3f9c.../kind
.tools/kubeconfig                   credentials of the cluster, for this checkout
cache/tools/<name>-<content hash>/  binaries, addressed by the hash of what they are built from
cache/logs/<step>.log               the whole output of the last long step of that name
"""

from __future__ import annotations

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).resolve().parent
TOOLS = CHECKOUT / ".tools"
TOOLS_BIN = TOOLS / "bin"
KUBECONFIG = TOOLS / "kubeconfig"
BOOTSTRAP_LOCK = CHECKOUT / "requirements" / "bootstrap.txt"


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/millstream`, created; `~/.cache` where the variable is unset or relative (as XDG says)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    folder = root / "millstream"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def subfolder(name: str) -> Path:
    """A folder of the cache, created."""
    folder = cache_folder() / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def link_tool(binary: Path) -> Path:
    """Point `.tools/bin/<name>` at `binary`, replacing an older link in one rename. Returns the link."""
    TOOLS_BIN.mkdir(parents=True, exist_ok=True)
    link = TOOLS_BIN / binary.name
    fresh = TOOLS_BIN / f".{binary.name}.{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(binary)
    fresh.replace(link)
    return link
