"""Which packages Debian's security suite has now: a digest that changes when one of them is updated.

    InRelease of the suite (35 kB) ─> the line of main/binary-<architecture>/Packages ─> digest ─> tag of the base image

Its date alone changes daily and is left out. It is asked at most twice a day; without a network, or where something
else answers, the last digest stays. It only says when to build anew: what is installed, apt verifies by signature.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable

from hack.cluster import paths

FRESH_SECONDS = 12 * 3600.0
_LOOK_SECONDS = 5.0
_LIMIT_BYTES = 1 << 20


def index_digest(release: str, architecture: str) -> str:
    """The SHA-256 of the suite's list of packages, as its InRelease file names it; empty where it names none."""
    pattern = rf"^ ([0-9a-f]{{64}}) +\d+ main/binary-{re.escape(architecture)}/Packages(?:\.xz|\.gz)?$"
    found = re.search(pattern, release, re.MULTILINE)
    return found[1] if found else ""


def newest(uri: str, suite: str, architecture: str, *, fetch: Callable[[str], str] | None = None) -> str:
    """The digest now, or the last one that was seen; empty where there never was one."""
    memory = paths.cache_folder() / "security-updates.json"
    place = f"{suite}/{architecture}"
    try:
        seen = json.loads(memory.read_text())[place]
        digest, at = str(seen["digest"]), float(seen["at"])
    except (OSError, ValueError, KeyError, TypeError):
        digest, at = "", 0.0
    if not uri or 0 <= time.time() - at < FRESH_SECONDS:
        return digest
    try:
        found = index_digest((fetch or _fetched)(f"{uri.rstrip('/')}/dists/{suite}/InRelease"), architecture)
    except (OSError, ValueError):
        found = ""
    if found:
        memory.write_text(json.dumps({place: {"digest": found, "at": time.time()}}) + "\n")
    return found or digest


def _fetched(address: str) -> str:
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"{address} is not a web address")
    with urllib.request.urlopen(address, timeout=_LOOK_SECONDS) as answer:  # noqa: S310 - apt's own mirror
        return str(answer.read(_LIMIT_BYTES).decode("utf-8", "replace"))
