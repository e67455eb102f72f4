"""API keys from a file (`key_file.py` says what it holds). A mounted Secret is such a file.

The file is read again when it changes, so keys are rotated without a restart. A new file that cannot be used changes
nothing: the last good keys stay, and log and /ready say why. Keys are kept as SHA-256 digests and every one is compared
in constant time, so response times reveal nothing about a key (CVE-2025-59425). No key is ever logged.

The operator's probe has another key. Only its digest is known here: it comes with the live configuration, opens
PROBE_ROUTES and nothing else, and opens nothing where there is no file of keys.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from millstream_runtime.config_files import API_KEYS_FOLDER
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.logs import log
from millstream_runtime.server.http.key_file import MAX_KEYS, read_keys

RECHECK_SECONDS = 1.0
MAX_FILE_BYTES = 1 << 20  # also the size of the largest Secret

# A probe has no key, and neither has a Prometheus that scrapes pods, or who chooses between them.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/load"})
# What the key of the operator's probe opens besides; `openai/probe_limits.py` says which completions.
PROBE_ROUTES = frozenset({("GET", "/v1/models"), ("POST", "/v1/completions")})


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """Who sent a valid key. `tenant`: a name that says nothing of the key."""

    tenant: str
    is_probe: bool = False


class ApiKeysInvalid(RuntimeFailure):
    """The file of API keys cannot be used. `problem`: what is wrong with it, without the path and without a key.

    `cause`: why it cannot be opened; None where its content is wrong.
    """

    def __init__(self, path: Path, problem: str, cause: OSError | None = None) -> None:
        secret, is_missing = mounted_secret(path), isinstance(cause, FileNotFoundError)
        message = f"--api-keys-file {path} {problem}"
        if secret is not None and is_missing:
            message = (
                f"Secret {secret[0]} has no key {secret[1]}, or does not exist: create it with one API key per line, "
                "or correct auth.apiKeysSecretRef"
            )
            problem = "is gone: the Secret was deleted, or has no such key, and a pod that starts now fails"
        elif secret is not None:
            message = f"Key {secret[1]} of the Secret {secret[0]} (auth.apiKeysSecretRef) {problem}"
        super().__init__(FailureReason.API_KEYS_INVALID, f"{message}.")
        self.problem = problem


def mounted_secret(path: Path) -> tuple[str, str] | None:
    """Return the Secret and its key that the operator mounts at this path; None for any other file."""
    if path.parent.parent != Path(API_KEYS_FOLDER):
        return None
    return path.parent.name, path.name


class ApiKeys:
    """The accepted keys. Used on the event loop only."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ApiKeysInvalid: it cannot be read, is too large or has no key.
        """
        self._path = path
        self._refused_lines = ""  # of the file in use
        self._tenants = frozenset[str]()  # likewise
        self._above = frozenset[str]()  # tenants of the keys in use that rank above the others
        self._digests, self._version = self._read()
        self._probe_digests: tuple[bytes, ...] = ()
        self._refused = ""  # why the newest file is not used; empty: it is
        self._refused_version: tuple[int, ...] | None = None
        self._checked_at_seconds = time.monotonic()

    def accept_probe(self, digests: Iterable[str]) -> None:
        """Accept also the keys that have these SHA-256 digests, in hex, and no other probe's."""
        self._probe_digests = tuple(bytes.fromhex(digest) for digest in digests)

    def holder(self, authorization: str) -> KeyHolder | None:
        """The holder of the key in an `Authorization: Bearer` header; None if there is no such key."""
        self._reload_if_changed()
        scheme, _, key = authorization.partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        is_users = _holds(self._digests, given)
        is_probes = _holds(self._probe_digests, given)
        if not (is_users or is_probes) or scheme.lower() != "bearer":
            return None
        return KeyHolder(_tenant(given), is_probe=not is_users)

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants of the keys in the file, as `holder` names them; without the operator's probe."""
        return self._tenants

    def ranks_above(self, tenant: str) -> bool:
        """Whether the file says of the tenant's key that it ranks above the keys of which it does not."""
        return tenant in self._above

    @property
    def problem(self) -> str:
        """What is wrong with the file as it is now, without a key or the path; empty where all of it is used."""
        self._reload_if_changed()
        if self._refused:
            return f"the file {self._refused}; the keys that were read before stay valid"
        return self._refused_lines

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
            self._keep(ApiKeysInvalid(self._path, f"cannot be read: {error.strerror}", error))
        except ApiKeysInvalid as error:
            self._keep(error)
            if not isinstance(error.__cause__, OSError):  # a change of the permissions is not seen in the version
                self._refused_version = version
        else:
            self._refused = ""
            log.info("api_keys_reloaded", keys=len(self._digests))

    def _keep(self, refused: ApiKeysInvalid) -> None:
        """Keep the known keys, and say why once: the file may be half-written, or its Secret deleted."""
        if refused.problem != self._refused:
            log.warning("api_keys_bad", message=refused.message, kept="the last good keys")
        self._refused = refused.problem

    def _read(self) -> tuple[list[bytes], tuple[int, ...]]:
        try:
            version = _version(self._path)
            with self._path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            advice = "give a text file with one key per line"
            raise ApiKeysInvalid(self._path, f"cannot be read: {error.strerror}; {advice}", error) from error
        if len(content) > MAX_FILE_BYTES:
            raise ApiKeysInvalid(self._path, f"is larger than {MAX_FILE_BYTES} bytes")
        read = read_keys(content)
        if not read.keys:
            why = f": {read.problem}" if read.problems else "; write one key per line"
            raise ApiKeysInvalid(self._path, f"has no usable key{why}")
        if len(read.keys) > MAX_KEYS:
            raise ApiKeysInvalid(self._path, f"has {len(read.keys)} keys; at most {MAX_KEYS} are possible")
        if read.problem:
            log.warning("api_key_refused", file=str(self._path), message=read.problem, kept="the other keys")
        self._refused_lines = read.problem
        digests = [hashlib.sha256(key).digest() for key in read.keys]
        self._tenants = frozenset(map(_tenant, digests))
        self._above = frozenset(_tenant(hashlib.sha256(key).digest()) for key in read.above)
        return digests, version


def _tenant(digest: bytes) -> str:
    return digest.hex()[:16]


def _holds(digests: Iterable[bytes], given: bytes) -> bool:
    """Compare all, to take constant time."""
    found = False
    for digest in digests:
        found |= hmac.compare_digest(digest, given)
    return found


def _version(path: Path) -> tuple[int, ...]:
    """Changes with the file; through the symlinks by which Kubernetes swaps a mounted Secret."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
