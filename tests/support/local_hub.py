"""A local stand-in for the Hugging Face Hub: model info with blobs, resolve with LFS redirects to a CDN, its errors.

Written after the public API's own answers: LFS files are redirected to another origin with a signed query, small files
are served in place, private and gated repositories answer with `X-Error-Code`.
"""

from __future__ import annotations

import hashlib
import json
from urllib.parse import unquote, urlsplit

from tests.support.local_web import Handler, LocalWeb

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LFS_SUFFIXES = (".safetensors", ".bin")


class LocalCDN(LocalWeb):
    """Where LFS content lies; a signed query opens it, and a hub's token must never come here."""

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[str, bytes] = {}

    def respond(self, request: Handler) -> None:
        parts = urlsplit(request.path)
        content = self.contents.get(parts.path)
        if content is None or "signature=" not in parts.query:
            return request.answer(403)
        return request.answer_content(content)


class LocalHub(LocalWeb):
    """One repository, `org/tiny`, at `COMMIT`, which is `main`."""

    def __init__(self, cdn: LocalCDN, files: dict[str, bytes]) -> None:
        super().__init__()
        self.cdn = cdn
        self.files = files
        self.token = ""  # private where set
        self.gated = False
        self.plain_listing = False  # a mirror that lists neither sizes nor digests
        self.commits = {"main": COMMIT, COMMIT: COMMIT}

    def respond(self, request: Handler) -> None:
        parts = urlsplit(request.path)
        if not self._may(request):
            return None
        words = parts.path.strip("/").split("/")
        if words[:4] == ["api", "models", "org", "tiny"]:
            revision = unquote(words[5]) if len(words) > 5 else "main"
            return self._info(request, revision, blobs="blobs=true" in parts.query.lower())
        if words[:3] == ["org", "tiny", "resolve"]:
            return self._resolve(request, words[3], unquote("/".join(words[4:])))
        return request.answer(404, X_Error_Code="RepoNotFound")

    def _may(self, request: Handler) -> bool:
        given = request.headers.get("Authorization", "")
        if self.gated:
            request.answer(403 if given else 401, X_Error_Code="GatedRepo")
        elif self.token and given != f"Bearer {self.token}":
            request.answer(401, X_Error_Code="" if given else "RepoNotFound")
        else:
            return True
        return False

    def _info(self, request: Handler, revision: str, *, blobs: bool) -> None:
        if revision not in self.commits:
            return request.answer(404, X_Error_Code="RevisionNotFound")
        siblings = [self._sibling(name, blobs=blobs and not self.plain_listing) for name in self.files]
        info = {"id": "org/tiny", "sha": self.commits[revision], "siblings": siblings}
        return request.answer(200, json.dumps(info).encode(), Content_Type="application/json")

    def _sibling(self, name: str, *, blobs: bool) -> dict[str, object]:
        content = self.files[name]
        if not blobs:
            return {"rfilename": name}
        sibling: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git_blob_id(content)}
        if name.endswith(LFS_SUFFIXES):
            sibling["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 134}
        return sibling

    def _resolve(self, request: Handler, revision: str, name: str) -> None:
        if revision not in self.commits or name not in self.files:
            return request.answer(404, X_Error_Code="EntryNotFound")
        content = self.files[name]
        if not name.endswith(LFS_SUFFIXES):
            etag = f'"{git_blob_id(content)}"'
            return request.answer_content(content, ETag=etag, X_Repo_Commit=self.commits[revision])
        path = f"/blobs/{sha256(content)}"
        self.cdn.contents[path] = content
        return request.answer(
            302,
            Location=f"{self.cdn.url}{path}?signature=secret-{name}",
            X_Repo_Commit=self.commits[revision],
            X_Linked_Size=len(content),
            X_Linked_ETag=f'"{sha256(content)}"',
        )


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
