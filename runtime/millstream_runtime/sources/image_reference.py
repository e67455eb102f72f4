"""`registry/repository:tag@digest` as container engines read it. Pure.

llama                       registry-1.docker.io / library/llama : latest
org/llama:8b                registry-1.docker.io / org/llama : 8b
ghcr.io/org/llama@sha256:…  ghcr.io / org/llama @ sha256:…
registry:5000/llama         registry:5000 / llama : latest
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from millstream_runtime.errors import InvalidConfigError

DOCKER_HUB = "docker.io"
DOCKER_HUB_API = "registry-1.docker.io"

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]{1,5})?|\[[0-9a-fA-F:]+\](?::[0-9]{1,5})?")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ImageReference:
    """Where an image or artifact is. `tag` is ignored by the registry where there is a digest."""

    registry: str  # as the reference names it: the key in a docker config.json
    repository: str
    tag: str
    digest: str | None

    @property
    def api_host(self) -> str:
        """The host that answers /v2/."""
        return DOCKER_HUB_API if self.registry == DOCKER_HUB else self.registry

    @property
    def version(self) -> str:
        """What a manifest is asked by."""
        return self.digest or self.tag

    @property
    def name(self) -> str:
        """Registry and repository, without a version."""
        return f"{self.registry}/{self.repository}"

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}" if self.digest else f"{self.name}:{self.tag}"


def parse_reference(text: str) -> ImageReference:
    """Raises InvalidConfigError: not a reference."""
    rest, at, digest = text.partition("@")
    first, slash, remainder = rest.partition("/")
    if slash and (any(mark in first for mark in ".:[") or first == "localhost"):
        registry, path = first, remainder
    else:
        registry, path = DOCKER_HUB, rest
    path, colon, tag = path.partition(":")
    if registry == "index.docker.io":
        registry = DOCKER_HUB
    if registry == DOCKER_HUB and "/" not in path:
        path = f"library/{path}"
    named = _HOST.fullmatch(registry) and _REPOSITORY.fullmatch(path) and len(path) <= 255
    versioned = (not at or _DIGEST.fullmatch(digest)) and (not colon or _TAG.fullmatch(tag))
    if not (named and versioned):
        raise InvalidConfigError(
            f"--image is {text!r}; it must be like registry/repository:tag or registry/repository@sha256:<digest>."
        )
    return ImageReference(registry, path, tag or "latest", digest or None)
