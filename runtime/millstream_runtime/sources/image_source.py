"""A model in an OCI image or artifact, pulled through the registry's API: no container engine, no privileges.

    GET /v2/<repository>/manifests/<tag or digest>    an index -> our platform's manifest -> config + layers
    GET /v2/<repository>/blobs/<digest>               each layer, by its SHA-256

Two layouts are read:

- an *image* (it has a Docker or OCI image config): the model lies in the folder /models (`COPY … /models/`);
- an *artifact* (anything else: ORAS, CNCF ModelPack): each layer is a file with its name in an annotation, or a tar.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.sources.addresses import NamedServer
from millstream_runtime.sources.client import Client, HTTPStatus, RetryPolicy, TransferError
from millstream_runtime.sources.image_reference import ImageReference, parse_reference
from millstream_runtime.sources.registry_auth import RegistryAuth, read_login
from millstream_runtime.sources.selection import GGUF_SUFFIX, invalid, name_in_model, safe_relative_path
from millstream_runtime.sources.source import ImageLayer, ResolvedSource
from millstream_runtime.sources.transfer import Digest, RemoteFile

MANIFEST_LIMIT_BYTES = 4 << 20
MAX_LAYERS = 2000
IMAGE_FOLDER = "models"
IMAGE_CONFIGS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
NAME_ANNOTATIONS = ("org.cncf.model.filepath", "org.opencontainers.image.title")
UNPACK_ANNOTATION = "io.deis.oras.content.unpack"
MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


class ImageSource:
    """An image or artifact by reference. `plain_http` is for a registry inside the cluster without TLS."""

    def __init__(
        self,
        reference: str | ImageReference,
        *,
        docker_configs: Sequence[Path] = (),
        plain_http: bool = False,
        policy: RetryPolicy | None = None,
    ) -> None:
        self.reference = parse_reference(reference) if isinstance(reference, str) else reference
        host = self.reference.api_host
        loopback = urlsplit(f"//{host}").hostname in ("localhost", "127.0.0.1", "::1")
        self.base_url = f"{'http' if plain_http or loopback else 'https'}://{host}/v2/{self.reference.repository}"
        self._docker_configs, self._plain_http, self._policy = docker_configs, plain_http, policy
        logins = (read_login(path, self.reference.registry) for path in docker_configs)
        login = next((found for found in logins if found is not None), None)
        registry = NamedServer(self.base_url, self.reference.registry)  # as the spec has it
        self._auth = RegistryAuth(registry, self.reference.repository, login, policy)
        self.client = Client(registry, self._auth, policy)

    def __str__(self) -> str:
        return str(self.reference)

    @property
    def requested_revision(self) -> str:
        return self.reference.version

    @property
    def identity(self) -> Mapping[str, str]:
        return {"kind": "image", "reference": self.reference.name}

    def at(self, revision: str) -> ImageSource:
        """Pinned to a manifest's digest."""
        pinned = ImageReference(self.reference.registry, self.reference.repository, self.reference.tag, revision)
        return ImageSource(
            pinned, docker_configs=self._docker_configs, plain_http=self._plain_http, policy=self._policy
        )

    def resolve(self) -> ResolvedSource:
        """The manifest's digest (the index's, where there is one) and what its layers are.

        Raises:
            RuntimeFailure: DownloadUnauthorized, DownloadFailed, CheckpointInvalid (a manifest that is not one).
        """
        manifest, revision = self._manifest(self.reference.version)
        if _is_index(manifest):
            manifest, _ = self._manifest(_choose_platform(manifest, str(self)))
        try:
            is_image = manifest.get("config", {}).get("mediaType") in IMAGE_CONFIGS
            layers = [self._layer(layer, is_image=is_image) for layer in manifest["layers"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise invalid(f"{self} has a manifest that cannot be read: {error!r}.") from None
        if len(layers) > MAX_LAYERS:
            raise invalid(f"{self} has {len(layers)} layers; at most {MAX_LAYERS} are read.")
        archives = tuple(ImageLayer(blob, IMAGE_FOLDER if is_image else "") for blob, packed in layers if packed)
        return ResolvedSource(
            revision, _plain_names([blob for blob, packed in layers if not packed], str(self)), archives
        )

    def explain(self, error: TransferError, what: str) -> RuntimeFailure:
        if not isinstance(error, HTTPStatus):
            return RuntimeFailure(FailureReason.DOWNLOAD_FAILED, f"Fetching {what} of {self} failed: {error}.")
        if error.status in (401, 403):
            given = "the login of the image pull Secret was refused" if self._auth.has_login else "no login was given"
            return RuntimeFailure(
                FailureReason.DOWNLOAD_UNAUTHORIZED,
                f"{self.reference.registry} does not let us read {self.reference.repository} (HTTP {error.status}): "
                f"{given}.",
            )
        if error.status == 404:
            return RuntimeFailure(
                FailureReason.DOWNLOAD_FAILED, f"{what} of {self} does not exist (HTTP 404); check name and tag."
            )
        return RuntimeFailure(FailureReason.DOWNLOAD_FAILED, f"Fetching {what} of {self} failed: {error}.")

    def _manifest(self, version: str) -> tuple[dict[str, Any], str]:
        """A manifest or index, and its digest, which is checked where it was asked for."""
        accept = {"Accept": ", ".join((*MANIFESTS, *INDEXES))}
        try:
            body, _ = self.client.get(f"{self.base_url}/manifests/{version}", MANIFEST_LIMIT_BYTES, accept)
        except TransferError as error:
            raise self.explain(error, "the manifest") from None
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if version.startswith("sha256:") and digest != version:
            raise RuntimeFailure(
                FailureReason.DOWNLOAD_FAILED,
                f"{self.reference.registry} answered {version} with a manifest that is {digest}.",
            )
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise invalid(f"{self} has a manifest that is not a JSON object.")
        return content, digest

    def _layer(self, layer: Mapping[str, Any], *, is_image: bool) -> tuple[RemoteFile, bool]:
        """The blob, and whether it is an archive."""
        algorithm, _, value = str(layer["digest"]).partition(":")
        size_bytes = layer["size"]
        if algorithm != "sha256" or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
            raise ValueError(f"digest {layer['digest']!r}")
        if not isinstance(size_bytes, int) or isinstance(size_bytes, bool) or size_bytes < 0:
            raise ValueError(f"size {size_bytes!r}")
        annotations = layer.get("annotations") or {}
        title = next((str(annotations[key]) for key in NAME_ANNOTATIONS if key in annotations), "")
        packed = is_image or annotations.get(UNPACK_ANNOTATION) == "true" or "tar" in str(layer.get("mediaType", ""))
        if not packed and not title:
            title = value  # a blob without a name, such as a licence: never one that a server needs
        url = f"{self.base_url}/blobs/sha256:{value}"
        name = f"layer {value[:12]}" if packed else title
        return RemoteFile(name, url, size_bytes, Digest("sha256", value)), packed


def _is_index(manifest: Mapping[str, Any]) -> bool:
    return manifest.get("mediaType") in INDEXES or ("manifests" in manifest and "layers" not in manifest)


def _choose_platform(index: Mapping[str, Any], where: str) -> str:
    """The digest for linux on this machine; weights are the same on all, so else the first real entry."""
    try:
        entries = [
            (entry.get("platform") or {}, str(entry["digest"]))
            for entry in index["manifests"]
            if (entry.get("platform") or {}).get("architecture") != "unknown"  # attestations
        ]
        wanted = MACHINES.get(platform.machine(), platform.machine())
        fitting = [digest for about, digest in entries if about.get("architecture") == wanted]
        return (fitting or [digest for _, digest in entries])[0]
    except (KeyError, TypeError, AttributeError, IndexError):
        raise invalid(f"{where} is an index without a manifest.") from None


def _plain_names(blobs: list[RemoteFile], where: str) -> dict[str, RemoteFile]:
    """Files of an artifact by name: a folder that all share is dropped; others are left out, but for templates."""
    paths: list[tuple[PurePosixPath, RemoteFile]] = []
    for blob in blobs:
        path = safe_relative_path(blob.name)
        if path is None:
            raise invalid(f"{where} has a file with the name {blob.name[:80]!r}, which leads out of its folder.")
        paths.append((path, blob))
    configs = {path.parent for path, _ in paths if path.name == "config.json"}
    configs = configs or {path.parent for path, _ in paths if path.suffix == GGUF_SUFFIX}
    top = min(configs, key=lambda folder: (len(folder.parts), str(folder)), default=PurePosixPath())
    named = [(name_in_model(path, top), blob) for path, blob in paths]
    return {name: RemoteFile(name, blob.url, blob.size_bytes, blob.digest) for name, blob in named if name is not None}
