"""The few calls of the OCI distribution API that pushing an image takes.

    POST   /v2/<repository>/blobs/uploads/          open an upload, or mount a blob that another repository has
    PATCH  <location>  (chunked)                    the bytes, hashed on their way
    PUT    <location>?digest=sha256:...             close it: the registry checks the hash
    PUT    /v2/<repository>/manifests/<tag>         name what belongs together

Plain HTTP on loopback, HTTPS elsewhere, no log-in: a registry that wants one is `docker push`'s job.
"""

from __future__ import annotations

import hashlib
import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlencode, urlsplit

from hack.images.errors import ImageError

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a manifest says of one blob."""

    media_type: str
    digest: str
    size_bytes: int

    def as_json(self) -> dict[str, Any]:
        """The OCI form."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size_bytes}

    @staticmethod
    def of(value: Mapping[str, Any]) -> Descriptor:
        """From the OCI form."""
        return Descriptor(value["mediaType"], value["digest"], value["size"])


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest, or an index of them, and the digest that names exactly this one."""

    content: dict[str, Any]
    digest: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, read to its end; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Registry:
    """One registry, by its host and port, such as `localhost:5001`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._plain = (urlsplit(f"//{address}").hostname or "") in _LOOPBACK

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """The manifest or index of a tag or digest; None when the registry has none."""
        accept = ", ".join((OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_INDEX))
        answer = self._call("GET", f"/v2/{repository}/manifests/{reference}", headers={"Accept": accept})
        if answer.status == 404:
            return None
        self.expect(answer, 200, f"reading {repository}:{reference}")
        return Manifest(json.loads(answer.body), f"sha256:{hashlib.sha256(answer.body).hexdigest()}")

    def put_manifest(self, repository: str, tag: str, content: Mapping[str, Any]) -> str:
        """Store a manifest under `tag`; returns its digest."""
        body = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        headers = {"Content-Type": content["mediaType"]}
        answer = self._call("PUT", f"/v2/{repository}/manifests/{tag}", body=body, headers=headers)
        self.expect(answer, 201, f"writing {repository}:{tag}")
        return f"sha256:{hashlib.sha256(body).hexdigest()}"

    def blob(self, repository: str, digest: str) -> bytes:
        """The bytes of a small blob, such as an image's configuration."""
        answer = self._call("GET", f"/v2/{repository}/blobs/{digest}")
        self.expect(answer, 200, f"reading {digest} of {repository}")
        return answer.body

    def has_blob(self, repository: str, digest: str) -> bool:
        """Whether the repository holds the blob."""
        return self._call("HEAD", f"/v2/{repository}/blobs/{digest}").status == 200

    def put_blob(self, repository: str, data: bytes, media_type: str) -> Descriptor:
        """Store a small blob."""
        with self.upload(repository) as upload:
            upload.write(data)
        return Descriptor(media_type, upload.digest, upload.size_bytes)

    def mount(self, repository: str, digest: str, source: str) -> None:
        """Make a blob of repository `source` one of `repository` too, without sending it again."""
        query = urlencode({"mount": digest, "from": source})
        answer = self._call("POST", f"/v2/{repository}/blobs/uploads/?{query}", body=b"")
        self.expect(answer, 201, f"mounting {digest} of {source} in {repository}")

    def upload(self, repository: str) -> Upload:
        """Open an upload; a context manager that is written to, and has a digest when it is closed."""
        answer = self._call("POST", f"/v2/{repository}/blobs/uploads/", body=b"")
        self.expect(answer, 202, f"opening an upload to {repository}")
        return Upload(self, repository, answer.headers["location"])

    def connect(self) -> http.client.HTTPConnection:
        """A new connection to this registry."""
        kind = http.client.HTTPConnection if self._plain else http.client.HTTPSConnection
        return kind(self.address, timeout=_TIMEOUT_SECONDS)

    def _call(
        self, method: str, path: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = self.connect()
        try:
            connection.request(method, path, body=body, headers=dict(headers or {}))
            response = connection.getresponse()
            lowered = {key.lower(): value for key, value in response.getheaders()}
            return Answer(response.status, lowered, response.read())
        except (OSError, http.client.HTTPException) as error:
            raise self.unreachable(error) from None
        finally:
            connection.close()

    def expect(self, answer: Answer, status: int, what: str) -> None:
        """Raise an ImageError unless `answer` has this status."""
        if answer.status == status:
            return
        if answer.status in (401, 403):
            raise ImageError(
                f"{self.address} wants a log-in for {what}: write the build context with "
                "`python -m hack.images stage`, then use docker build and docker push."
            )
        text = answer.body.decode(errors="replace").strip()[:300]
        raise ImageError(f"{self.address} answered {answer.status} instead of {status} for {what}: {text}")

    def unreachable(self, error: Exception) -> ImageError:
        """The sentence for a registry that does not answer."""
        detail = str(error) or type(error).__name__
        return ImageError(f"The registry at {self.address} does not answer ({detail}): run `make cluster-up` first.")


class Upload:
    """Bytes on their way to a registry, hashed as they go. `digest` and `size_bytes` are final after the block."""

    def __init__(self, registry: Registry, repository: str, location: str) -> None:
        self._registry = registry
        self._repository = repository
        self._connection = registry.connect()
        self._hash = hashlib.sha256()
        self.size_bytes = 0
        self._begin(location)

    @property
    def digest(self) -> str:
        """`sha256:...` of what was written so far."""
        return f"sha256:{self._hash.hexdigest()}"

    def write(self, data: bytes) -> int:
        """Send and hash some bytes."""
        if not data:
            return 0
        self._hash.update(data)
        self.size_bytes += len(data)
        try:
            self._connection.send(b"%x\r\n" % len(data))
            self._connection.send(data)
            self._connection.send(b"\r\n")
        except (OSError, http.client.HTTPException) as error:
            raise self._registry.unreachable(error) from None
        return len(data)

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An upload that failed half-way is left to the registry, which forgets it; no blob appears.
        try:
            if error is None:
                self._finish()
        finally:
            self._connection.close()

    def _begin(self, location: str) -> None:
        try:
            self._connection.putrequest("PATCH", _path(location))
            self._connection.putheader("Content-Type", "application/octet-stream")
            self._connection.putheader("Transfer-Encoding", "chunked")
            self._connection.endheaders()
        except (OSError, http.client.HTTPException) as error:
            raise self._registry.unreachable(error) from None

    def _finish(self) -> None:
        try:
            self._connection.send(b"0\r\n\r\n")
            location = self._answer(202).headers["location"]
            path = _path(location)
            query = urlencode({"digest": self.digest})
            self._connection.request("PUT", f"{path}{'&' if '?' in path else '?'}{query}", body=b"")
            self._answer(201)
        except (OSError, http.client.HTTPException) as error:
            raise self._registry.unreachable(error) from None

    def _answer(self, status: int) -> Answer:
        response = self._connection.getresponse()
        lowered = {key.lower(): value for key, value in response.getheaders()}
        answer = Answer(response.status, lowered, response.read())
        self._registry.expect(answer, status, f"an upload to {self._repository}")
        return answer


def _path(location: str) -> str:
    """Path and query of an upload's location, which may be a whole address."""
    parts = urlsplit(location)
    return parts.path + (f"?{parts.query}" if parts.query else "")
