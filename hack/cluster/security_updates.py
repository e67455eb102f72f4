"""Which packages Debian's security suite has now: a digest that changes when one of them is updated.

    InRelease of the suite (35 kB) ─> the line of main/binary-<architecture>/Packages ─> digest ─> tag of the base image

Its date alone changes daily and is left out. It is asked at most twice a day; without a network, or where something
else answers, the last digest stays, one line says why, and the next look is half an hour later. It only says when to
build anew: what is installed, apt verifies by signature. A build that failed is remembered for as long.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from hack.cluster import paths

FRESH_SECONDS = 12 * 3600.0
RETRY_SECONDS = 1800.0  # after a look or a build that failed
_NETWORK_TROUBLE = (OSError, ValueError, http.client.HTTPException)
MEMORY = "security-updates.json"
_LOOK_SECONDS = 5.0
_LIMIT_BYTES = 1 << 20


def index_digest(release: str, architecture: str) -> str:
    """The SHA-256 of the suite's list of packages, as its InRelease file names it; empty where it names none."""
    pattern = rf"^ ([0-9a-f]{{64}}) +\d+ main/binary-{re.escape(architecture)}/Packages(?:\.xz|\.gz)?$"
    found = re.search(pattern, release, re.MULTILINE)
    return found[1] if found else ""


def newest(
    uri: str,
    suite: str,
    architecture: str,
    say: Callable[[str], None] = lambda _: None,
    *,
    fetch: Callable[[str], str] | None = None,
) -> str:
    """The digest now, or the last one that was seen; empty where there never was one. `say` gets a line on trouble."""
    memory, place = _remembered(), f"{suite}/{architecture}"
    seen = memory.get(place, {})
    digest = str(seen.get("digest", ""))
    if not uri or _is_within(seen.get("at"), FRESH_SECONDS) or _is_within(seen.get("failed_at"), RETRY_SECONDS):
        return digest
    address = f"{uri.rstrip('/')}/dists/{suite}/InRelease"
    try:
        found = index_digest((fetch or _fetched)(address), architecture)
        trouble = "" if found else "the answer names no packages of this architecture"
    except _NETWORK_TROUBLE as error:
        found, trouble = "", str(error) or type(error).__name__
    if found:
        _remember(memory | {place: {"digest": found, "at": time.time()}})
        return found
    say(f"Debian's security updates are not known: {address}: {trouble}. It is asked again in 30 minutes.")
    _remember(memory | {place: seen | {"failed_at": time.time()}})
    return digest


def remember_failed_build(image: str) -> None:
    """Note that an image could not be made."""
    _remember(_remembered() | {"build": {"image": image, "failed_at": time.time()}})


def failed_lately(image: str) -> bool:
    """Whether the image could not be made a while ago: another try would take minutes and most likely fail again."""
    build = _remembered().get("build", {})
    return build.get("image") == image and _is_within(build.get("failed_at"), RETRY_SECONDS)


def _remembered() -> dict[str, dict[str, Any]]:
    """What is known, by place; nothing where the file is missing or broken."""
    try:
        found = json.loads((paths.cache_folder() / MEMORY).read_text())
    except (OSError, ValueError):
        return {}
    return {name: one for name, one in found.items() if isinstance(one, dict)} if isinstance(found, dict) else {}


def _remember(memory: dict[str, dict[str, Any]]) -> None:
    with contextlib.suppress(OSError):  # a full disk: it is asked again
        (paths.cache_folder() / MEMORY).write_text(json.dumps(memory) + "\n")


def _is_within(at: object, seconds: float) -> bool:
    """Whether a moment is less than that long ago. One in the future is a clock that was set back."""
    return isinstance(at, int | float) and 0 <= time.time() - at < seconds


def _fetched(address: str) -> str:
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"{address} is not a web address")
    with urllib.request.urlopen(address, timeout=_LOOK_SECONDS) as answer:  # noqa: S310 - apt's own mirror
        return str(answer.read(_LIMIT_BYTES).decode("utf-8", "replace"))
