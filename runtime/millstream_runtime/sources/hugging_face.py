"""A repository on the Hugging Face Hub, or on anything that speaks its API (`HF_ENDPOINT`).

    GET <endpoint>/api/models/<repository>/revision/<revision>?blobs=true    the commit; each file's size and digest
    GET <endpoint>/<repository>/resolve/<commit>/<file>                      the content, mostly by a redirect to a CDN

Files in LFS carry their SHA-256, the others git's blob id. For a mirror that lists no sizes, HEAD is used,
where `X-Linked-Etag` (or `ETag`) is the same digest. The branch is resolved once: every file is of one commit.

`HF_ENDPOINT` may come from a Secret, so messages name the variable and not its value (`sources.addresses`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure
from millstream_runtime.sources.addresses import NamedServer, is_http_address
from millstream_runtime.sources.client import (
    BearerAuth,
    Client,
    HTTPStatus,
    NoAuth,
    RetryPolicy,
    TransferError,
)
from millstream_runtime.sources.selection import (
    INDEX_NAME,
    gguf_files_of_variant,
    gguf_only_in_folders,
    is_support_file,
    is_weights_file,
    name_in_model,
    safe_relative_path,
)
from millstream_runtime.sources.source import ResolvedSource
from millstream_runtime.sources.transfer import Digest, RemoteFile

DEFAULT_ENDPOINT = "https://huggingface.co"
OTHER_HUB = "the hub that HF_ENDPOINT names"
LISTING_LIMIT_BYTES = 32 << 20
HEAD_THREADS = 8

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_VARIANT = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./+-]{0,254}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")


class HuggingFace:
    """`repository` at `revision`; `org/name:Q4_K_M` is the one GGUF model of several whose name has that word.

    Raises:
        InvalidConfigError: a repository, variant, revision or endpoint that cannot be one.
    """

    def __init__(
        self,
        repository: str,
        revision: str = "main",
        *,
        endpoint: str = DEFAULT_ENDPOINT,
        token: str | None = None,
        policy: RetryPolicy | None = None,
    ) -> None:
        name, colon, variant = repository.partition(":")
        if not _REPOSITORY.fullmatch(name) or ".." in name or (colon and not _VARIANT.fullmatch(variant)):
            raise InvalidConfigError(f"--hugging-face is {repository!r}; it must be like org/name or org/name:Q4_K_M.")
        if not _REVISION.fullmatch(revision) or ".." in revision:
            raise InvalidConfigError(f"--revision is {revision!r}; it must be a branch, a tag or a commit.")
        endpoint = endpoint.rstrip("/")
        if not is_http_address(endpoint):
            raise InvalidConfigError(
                f"HF_ENDPOINT is not an address of a hub; it must be like {DEFAULT_ENDPOINT}, with no user or password."
            )
        self.repository, self.variant = name, variant
        self.requested_revision = revision
        self.endpoint = endpoint
        self._token = token
        self._policy = policy
        self._hub = NamedServer(endpoint, DEFAULT_ENDPOINT if endpoint == DEFAULT_ENDPOINT else OTHER_HUB)
        self.client = Client(self._hub, BearerAuth(token, endpoint) if token else NoAuth(), policy)

    def __str__(self) -> str:
        return f"{self._asked} at {self.requested_revision}"

    @property
    def identity(self) -> Mapping[str, str]:
        return {"kind": "huggingFace", "repository": self._asked}

    def at(self, revision: str) -> HuggingFace:
        return HuggingFace(self._asked, revision, endpoint=self.endpoint, token=self._token, policy=self._policy)

    def resolve(self) -> ResolvedSource:
        """The commit and the files that a server may need.

        Those of the top level, named chat templates, and the GGUF files that were named.

        Raises:
            RuntimeFailure: DownloadUnauthorized, DownloadFailed, CheckpointInvalid.
        """
        revision = quote(self.requested_revision, safe="")
        url = f"{self.endpoint}/api/models/{self.repository}/revision/{revision}?blobs=true"
        try:
            body, _ = self.client.get(url, LISTING_LIMIT_BYTES)
        except TransferError as error:
            raise self.explain(error, "the list of its files") from None
        commit, siblings = _read_listing(body, self._hub.name)
        named = [(sibling, _plain_name(sibling)) for sibling in siblings]
        listed = [(sibling, name) for sibling, name in named if name is not None]
        by_path = {str(path): sibling for sibling in siblings if (path := safe_relative_path(sibling["rfilename"]))}
        if self.variant:
            chosen = gguf_files_of_variant(by_path, self.variant, str(self))
            listed = [(sibling, name) for sibling, name in listed if not _is_of_other_weights(name)]
            listed += [(by_path[path], PurePosixPath(path).name) for path in sorted(chosen)]
        elif (failure := gguf_only_in_folders(by_path, str(self))) is not None:
            raise failure
        with ThreadPoolExecutor(HEAD_THREADS) as threads:
            files = list(threads.map(lambda pair: self._file(commit, *pair), listed))
        others = frozenset(sibling["rfilename"] for sibling, name in named if name is None)
        return ResolvedSource(commit, {file.name: file for file in files}, others=others)

    @property
    def _asked(self) -> str:
        return f"{self.repository}:{self.variant}" if self.variant else self.repository

    def explain(self, error: TransferError, what: str) -> RuntimeFailure:
        about = f"{self.repository} on {self._hub.name}"
        if not isinstance(error, HTTPStatus):
            cure = "; check the network, HTTPS_PROXY and HF_ENDPOINT" if error.retryable else ""
            return RuntimeFailure(FailureReason.DOWNLOAD_FAILED, f"Fetching {what} of {about} failed: {error}{cure}.")
        code = error.headers.get("x-error-code", "")
        if error.status in (401, 403):
            return RuntimeFailure(FailureReason.DOWNLOAD_UNAUTHORIZED, self._refusal(error.status, code, about))
        if code == "RevisionNotFound":
            sentence = f"{about} has no revision {self.requested_revision!r} (HTTP {error.status})."
        elif code == "EntryNotFound":
            sentence = f"{about} has no file {what} at {self.requested_revision} (HTTP {error.status})."
        elif error.status == 404:
            sentence = f"There is no {self} on {self._hub.name} (HTTP 404); check name and revision."
        else:
            sentence = f"Fetching {what} of {about} failed: {error}."
        return RuntimeFailure(FailureReason.DOWNLOAD_FAILED, sentence)

    def _refusal(self, status: int, code: str, about: str) -> str:
        if code == "GatedRepo":
            page = f"at {DEFAULT_ENDPOINT}/{self.repository}" if self.endpoint == DEFAULT_ENDPOINT else "on its page"
            who = "with the account of the token" if self._token else "and give a token of that account"
            return f"{about} is gated (HTTP {status}): accept its conditions {page} {who}."
        if self._token is None:
            return f"{about} is private, gated or does not exist, and no token was given (HTTP {status})."
        if status == 401 and code != "RepoNotFound":
            return f"The token was refused for {about} (HTTP 401): it is wrong, expired or revoked."
        return f"The token may not read {about}, or the repository does not exist (HTTP {status})."

    def _file(self, commit: str, sibling: Mapping[str, Any], name: str) -> RemoteFile:
        url = (
            f"{self.endpoint}/{self.repository}/resolve/{commit}/{quote(str(safe_relative_path(sibling['rfilename'])))}"
        )
        size_bytes, digest = _size_and_digest(sibling)
        if size_bytes is None or digest is None:
            try:
                headers = self.client.head(url).headers
            except TransferError as error:
                raise self.explain(error, name) from None
            size_bytes, digest = _from_headers(headers, name)
        return RemoteFile(name, url, size_bytes, digest)


def _read_listing(body: bytes, hub: str) -> tuple[str, list[dict[str, Any]]]:
    """The commit and the files' entries, each a dict with a string `rfilename`. `hub`: its name in messages."""
    try:
        info = json.loads(body)
        commit, siblings = info["sha"], info["siblings"]
        if not _GIT_SHA1.fullmatch(commit):
            raise ValueError("sha")
        return commit, [sibling for sibling in siblings if isinstance(sibling["rfilename"], str)]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RuntimeFailure(
            FailureReason.DOWNLOAD_FAILED,
            f"The list of files from {hub} is not that of a model hub: it needs `sha`, a commit, and `siblings` with "
            "their `rfilename`.",
        ) from None


def _plain_name(sibling: Mapping[str, Any]) -> str | None:
    """The name of a top-level file or of a named chat template that may be wanted; None for all others."""
    path = safe_relative_path(sibling["rfilename"])
    name = None if path is None else name_in_model(path, PurePosixPath())
    return name if name is not None and (is_support_file(name) or is_weights_file(name)) else None


def _is_of_other_weights(name: str) -> bool:
    """Whether it is of other weights than a GGUF file that was named: of another one, or of *.safetensors."""
    return is_weights_file(name) or name == INDEX_NAME


def _size_and_digest(sibling: Mapping[str, Any]) -> tuple[int | None, Digest | None]:
    lfs = sibling.get("lfs")
    size_bytes = sibling.get("size")
    if isinstance(lfs, dict):
        sha256 = str(lfs.get("sha256") or lfs.get("oid") or "").removeprefix("sha256:")
        size_bytes = lfs.get("size", size_bytes)
        digest = Digest("sha256", sha256) if _SHA256.fullmatch(sha256) else None
    else:
        blob = str(sibling.get("blobId") or "")
        digest = Digest("git-sha1", blob) if _GIT_SHA1.fullmatch(blob) else None
    right = isinstance(size_bytes, int) and not isinstance(size_bytes, bool) and size_bytes >= 0
    return (size_bytes if right else None), digest


def _from_headers(headers: Mapping[str, str], name: str) -> tuple[int, Digest | None]:
    etag = headers.get("x-linked-etag", headers.get("etag", "")).removeprefix("W/").strip('"')
    size = headers.get("x-linked-size", headers.get("content-length", ""))
    if not size.isdecimal():
        raise RuntimeFailure(
            FailureReason.DOWNLOAD_FAILED, f"The hub gives no size for {name}, so it cannot be verified."
        )
    if _SHA256.fullmatch(etag):
        return int(size), Digest("sha256", etag)
    return int(size), Digest("git-sha1", etag) if _GIT_SHA1.fullmatch(etag) else None
