"""How a container reaches a source: the flags of `millstream fetch` and `inspect`, and the files they name.

    huggingFace   --hugging-face=org/name --revision=<commit> --token-file=…/hub/<secret>/<key>
    image         --image=registry/name:tag@<digest> --docker-config=…/registry/<secret>/config.json

Credentials are mounted, never passed. They are optional for the kubelet: a missing Secret would keep the pod in
ContainerCreating without a message, while the command reports which file, named after Secret and key, is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.api.model import HuggingFaceSource, ImageSource, ModelSource, ObjectKey

TOKEN_VOLUME, LOGIN_VOLUME = "hub-token", "registry-logins"
TOKEN_FOLDER = "/var/run/secrets/millstream/hub"  # noqa: S105 - a path
LOGIN_FOLDER = "/var/run/secrets/millstream/registry"
PULL_SECRET_KEY = ".dockerconfigjson"  # noqa: S105 - of every Secret of type kubernetes.io/dockerconfigjson
DEFAULT_REVISION = "main"
CREDENTIAL_MODE = 0o440  # readable by the pod's fsGroup only


@dataclass(frozen=True, slots=True)
class SourceAccess:
    """Flags, and what they need in the pod and in the container."""

    flags: Sequence[str]
    volumes: Sequence[Mapping[str, Any]] = ()
    mounts: Sequence[Mapping[str, Any]] = field(default=())


def source_access(source: ModelSource, revision: str | None, pull_secrets: Sequence[str]) -> SourceAccess | None:
    """Return the access to a source that is downloaded, else None. `revision`: the commit or digest to pin."""
    if source.hugging_face is not None:
        return _hub(source.hugging_face, revision)
    if source.image is not None:
        return _image(source.image, revision, pull_secrets)
    return None


def pinned_reference(reference: str, digest: str | None) -> str:
    """`registry/name:1` -> `registry/name:1@sha256:…`: the tag is for people, the digest decides."""
    return reference if digest is None or "@" in reference else f"{reference}@{digest}"


def _hub(hub: HuggingFaceSource, revision: str | None) -> SourceAccess:
    flags = [f"--hugging-face={hub.repository}", f"--revision={revision or hub.revision or DEFAULT_REVISION}"]
    token = hub.token_secret_ref
    if token is None:
        return SourceAccess(flags)
    volume = {
        "name": TOKEN_VOLUME,
        "secret": {
            "secretName": token.name,
            "items": [{"key": token.key, "path": _named(token)}],
            "defaultMode": CREDENTIAL_MODE,
            "optional": True,
        },
    }
    mount = {"name": TOKEN_VOLUME, "mountPath": TOKEN_FOLDER, "readOnly": True}
    return SourceAccess([*flags, f"--token-file={TOKEN_FOLDER}/{_named(token)}"], [volume], [mount])


def _named(key: ObjectKey) -> str:
    return f"{key.name}/{key.key}"


def _image(image: ImageSource, digest: str | None, pull_secrets: Sequence[str]) -> SourceAccess:
    flags = [f"--image={pinned_reference(image.reference, digest)}"]
    if not pull_secrets:
        return SourceAccess(flags)
    logins = [
        {"secret": {"name": name, "items": [{"key": PULL_SECRET_KEY, "path": f"{name}/config.json"}], "optional": True}}
        for name in pull_secrets
    ]
    volume = {"name": LOGIN_VOLUME, "projected": {"sources": logins, "defaultMode": CREDENTIAL_MODE}}
    mount = {"name": LOGIN_VOLUME, "mountPath": LOGIN_FOLDER, "readOnly": True}
    flags += [f"--docker-config={LOGIN_FOLDER}/{name}/config.json" for name in pull_secrets]
    return SourceAccess(flags, [volume], [mount])
