"""API keys from a file: one per line, `#` begins a comment. A mounted Secret is such a file.

The file is read again when it changes, so keys are rotated without a restart. Keys are kept as SHA-256 digests and
every one is compared in constant time, so response times reveal nothing about a key (CVE-2025-59425).
"""

from __future__ import annotations

import hashlib
import hmac
import time
from pathlib import Path

from millstream_runtime.errors import InvalidConfigError
from millstream_runtime.logs import log

RECHECK_SECONDS = 1.0
MAX_FILE_BYTES = 1 << 20
MAX_KEY_CHARACTERS = 512

# A probe has no key, and neither has a Prometheus that scrapes pods.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


class ApiKeys:
    """The accepted keys. Used on the event loop only."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            InvalidConfigError: it cannot be read, is too large or has no key.
        """
        self._path = path
        self._digests, self._version = self._read()
        if not self._digests:
            raise InvalidConfigError(f"--api-keys-file {path} has no key; write one key per line.")
        self._checked_at_seconds = time.monotonic()

    def tenant(self, authorization: str) -> str | None:
        """A name for the holder of the key in an `Authorization: Bearer` header; None if there is no such key."""
        self._reload_if_changed()
        scheme, _, key = authorization.partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = False
        for digest in self._digests:  # compare all, to take constant time
            found |= hmac.compare_digest(digest, given)
        return given.hex()[:16] if found and scheme.lower() == "bearer" else None

    def _reload_if_changed(self) -> None:
        now = time.monotonic()
        if now - self._checked_at_seconds < RECHECK_SECONDS:
            return
        self._checked_at_seconds = now
        try:
            if _version(self._path) != self._version:
                self._digests, self._version = self._read()
                log.info("api_keys_reloaded", keys=len(self._digests))
        except (InvalidConfigError, OSError) as error:  # keep the known keys: the file may be half-written
            log.warning("api_keys_unreadable", error=type(error).__name__)

    def _read(self) -> tuple[list[bytes], tuple[int, ...]]:
        try:
            version = _version(self._path)
            if self._path.stat().st_size > MAX_FILE_BYTES:
                raise InvalidConfigError(f"--api-keys-file {self._path} is larger than {MAX_FILE_BYTES} bytes.")
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = type(error).__name__
            raise InvalidConfigError(
                f"--api-keys-file {self._path} cannot be read ({why}); give a text file with one key per line."
            ) from error
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if any(len(key) > MAX_KEY_CHARACTERS for key in keys):
            raise InvalidConfigError(f"--api-keys-file {self._path} has a key of over {MAX_KEY_CHARACTERS} characters.")
        return [hashlib.sha256(key.encode()).digest() for key in keys], version


def _version(path: Path) -> tuple[int, ...]:
    """Changes with the file; through the symlinks by which Kubernetes swaps a mounted Secret."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
