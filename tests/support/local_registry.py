"""A local stand-in for an OCI registry, for pulling: manifests and blobs, anonymous, Basic or by a token service."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterable
from typing import Any

from tests.support.local_web import Handler, LocalWeb

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
TAR, TAR_GZIP = "application/vnd.oci.image.layer.v1.tar", "application/vnd.oci.image.layer.v1.tar+gzip"
USER, PASSWORD, TOKEN = "puller", "a password", "a-short-lived-token"


class LocalRegistry(LocalWeb):
    """`wants`: "" (anonymous), "basic", or "bearer" (a token that only the login gets)."""

    def __init__(self) -> None:
        super().__init__()
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.wants = ""
        self.realm = ""  # "": its own

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def respond(self, request: Handler) -> None:
        path = request.path.partition("?")[0]
        given = request.headers.get("Authorization", "")
        login = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if path == "/token":
            body = json.dumps({"token": TOKEN}).encode()
            return request.answer(200, body) if given == login else request.answer(401)
        if self.wants == "basic" and given != login:
            return request.answer(401, WWW_Authenticate='Basic realm="registry"')
        if self.wants == "bearer" and given != f"Bearer {TOKEN}":
            challenge = (
                f'Bearer realm="{self.realm or self.url}/token",service="local",scope="repository:org/tiny:pull"'
            )
            return request.answer(401, WWW_Authenticate=challenge)
        match = re.fullmatch(r"/v2/org/tiny/(manifests|blobs)/(.+)", path)
        if match and match[1] == "blobs" and match[2] in self.blobs:
            return request.answer_content(self.blobs[match[2]])
        if match and match[1] == "manifests" and match[2] in self.manifests:
            kind, content = self.manifests[match[2]]
            return request.answer(200, content, Content_Type=kind)
        return request.answer(404)

    def blob(self, content: bytes, media_type: str, **annotations: str) -> dict[str, Any]:
        """Store a blob; its descriptor. Annotation names with __ for a dot."""
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.blobs[digest] = content
        described: dict[str, Any] = {"mediaType": media_type, "digest": digest, "size": len(content)}
        if annotations:
            described["annotations"] = {key.replace("__", "."): value for key, value in annotations.items()}
        return described

    def manifest(self, tag: str, layers: list[dict[str, Any]], config_type: str = OCI_CONFIG) -> str:
        """Store a manifest under `tag` and its digest; the digest."""
        config = self.blob(b"{}", config_type)
        content = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": layers}
        return self.put(tag, OCI_MANIFEST, content)

    def put(self, tag: str, kind: str, content: dict[str, Any]) -> str:
        body = json.dumps(content).encode()
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        self.manifests[tag] = self.manifests[digest] = (kind, body)
        return digest

    def image(self, tag: str, *archives: bytes) -> str:
        """An image of these layers, gzip where they are."""
        kinds = [TAR_GZIP if archive[:2] == b"\x1f\x8b" else TAR for archive in archives]
        return self.manifest(tag, [self.blob(*pair) for pair in zip(archives, kinds, strict=True)])

    def artifact(self, tag: str, files: dict[str, bytes]) -> str:
        """An artifact with a raw layer for each file, as ORAS pushes them."""
        kind = "application/octet-stream"
        layers = [self.blob(data, kind, org__opencontainers__image__title=name) for name, data in files.items()]
        return self.manifest(tag, layers, "application/vnd.oci.empty.v1+json")


def tar_of(entries: Iterable[tuple[str, bytes] | tarfile.TarInfo], *, compress: bool = False) -> bytes:
    """A tar archive: (name, content) pairs, or ready TarInfos without content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size = len(entry[1])
                tar.addfile(info, io.BytesIO(entry[1]))
    return gzip.compress(buffer.getvalue()) if compress else buffer.getvalue()
