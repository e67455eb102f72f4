"""API keys from a file: one per line, `#` begins a comment. A mounted Secret is such a file.

The file is read again when it changes, so keys are rotated without a restart. A new file that cannot be used changes
nothing: the last good keys stay, and the log says why. Keys are kept as SHA-256 digests and every one is compared in
constant time, so response times reveal nothing about a key (CVE-2025-59425). No key is ever logged.

The operator's probe has a key of its own, which only its digest is known of here: it comes with the live
configuration, and it alone opens nothing where there is no file of keys.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Iterable
from pathlib import Path

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.logs import log

RECHECK_SECONDS = 1.0
MAX_FILE_BYTES = 1 << 20  # also the size of the largest Secret
MAX_KEYS = 1000  # each request is compared with all of them
MAX_KEY_CHARACTERS = 512

# A probe has no key, and neither has a Prometheus that scrapes pods.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


class ApiKeysInvalid(RuntimeFailure):
    """The file of API keys cannot be used. The message names the file and the line, never a key."""

    def __init__(self, message: str) -> None:
        super().__init__(FailureReason.API_KEYS_INVALID, message)


class ApiKeys:
    """The accepted keys. Used on the event loop only."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ApiKeysInvalid: it cannot be read, is too large or has no key.
        """
        self._path = path
        self._digests, self._version = self._read()
        self._probe_digests: tuple[bytes, ...] = ()
        self._refused = ""  # why the newest file is not used; empty: it is
        self._refused_version: tuple[int, ...] | None = None
        self._checked_at_seconds = time.monotonic()

    def accept_probe(self, digests: Iterable[str]) -> None:
        """Accept also the keys that have these SHA-256 digests, in hex, and no other probe's."""
        self._probe_digests = tuple(bytes.fromhex(digest) for digest in digests)

    def tenant(self, authorization: str) -> str | None:
        """A name for the holder of the key in an `Authorization: Bearer` header; None if there is no such key."""
        self._reload_if_changed()
        scheme, _, key = authorization.partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = False
        for digest in (*self._digests, *self._probe_digests):  # compare all, to take constant time
            found |= hmac.compare_digest(digest, given)
        return given.hex()[:16] if found and scheme.lower() == "bearer" else None

    def _reload_if_changed(self) -> None:
        now = time.monotonic()
        if now - self._checked_at_seconds < RECHECK_SECONDS:
            return
        self._checked_at_seconds = now
        version = None
        try:
            version = _version(self._path)
            if version == self._version:
                self._refused = ""
                return
            if version == self._refused_version:
                return  # reading a large one again and again would delay answers
            self._digests, self._version = self._read()
        except OSError as error:
            self._keep(f"{self._path} cannot be read: {error.strerror}")
        except ApiKeysInvalid as error:
            self._keep(error.message)
            self._refused_version = version
        else:
            self._refused = ""
            log.info("api_keys_reloaded", keys=len(self._digests))

    def _keep(self, why: str) -> None:
        """Keep the known keys, and say why once: the file may be half-written, or its Secret deleted."""
        if why != self._refused:
            log.warning("api_keys_bad", message=why, kept="the last good keys")
        self._refused = why

    def _read(self) -> tuple[list[bytes], tuple[int, ...]]:
        try:
            version = _version(self._path)
            with self._path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                raise ApiKeysInvalid(f"--api-keys-file {self._path} is larger than {MAX_FILE_BYTES} bytes.")
            lines = content.decode("utf-8-sig").splitlines()
        except OSError as error:
            raise ApiKeysInvalid(
                f"--api-keys-file {self._path} cannot be read: {error.strerror}; give a text file with one key per "
                "line. In a pod the path ends with the Secret and the key of it that spec.auth names: create them."
            ) from error
        except UnicodeDecodeError:
            raise ApiKeysInvalid(
                f"--api-keys-file {self._path} is not UTF-8 text; give a text file with one key per line."
            ) from None
        return [hashlib.sha256(key.encode()).digest() for key in self._keys_of(lines)], version

    def _keys_of(self, lines: Iterable[str]) -> list[str]:
        keys: list[str] = []
        for number, line in enumerate(lines, start=1):
            key = line.strip()
            if not key or key.startswith("#"):
                continue
            where = f"--api-keys-file {self._path}, line {number}:"
            if len(key) > MAX_KEY_CHARACTERS:
                raise ApiKeysInvalid(f"{where} a key has at most {MAX_KEY_CHARACTERS} characters.")
            if not key.isascii() or not key.isprintable():
                raise ApiKeysInvalid(f"{where} a key is printable ASCII, because a header carries nothing else.")
            keys.append(key)
        if not keys:
            raise ApiKeysInvalid(f"--api-keys-file {self._path} has no key; write one key per line.")
        if len(keys) > MAX_KEYS:
            raise ApiKeysInvalid(f"--api-keys-file {self._path} has {len(keys)} keys; at most {MAX_KEYS} are possible.")
        return keys


def _version(path: Path) -> tuple[int, ...]:
    """Changes with the file; through the symlinks by which Kubernetes swaps a mounted Secret."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
