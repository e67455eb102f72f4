"""How the model's files come into the pod: nothing to do, a mounted volume, or a download before the runtime starts.

    local                   in the image            /models/<path>
    persistentVolumeClaim   mounted, read-only      /models/persistentVolumeClaim/<path>
    huggingFace             `millstream fetch`      /models/huggingFace, an emptyDir: each pod downloads for itself

The download is an init container of the runtime's own image. It verifies every file and goes on where it stopped when
it is restarted; why it failed is in its termination message, as with the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.api.model import HuggingFaceSource, ModelSource, PersistentVolumeClaimSource
from millstream_operator.rendering.names import FETCH_CONTAINER
from millstream_operator.rendering.runtime_config import IMAGE_MODEL_ROOT

MODEL_VOLUME, TOKEN_VOLUME = "model", "hub-token"
TOKEN_FOLDER = "/var/run/secrets/millstream/hub"  # noqa: S105 - a path
DEFAULT_REVISION = "main"
# The measured peak of `millstream fetch` is 30 MB; the limit keeps a namespace's LimitRange from choosing another.
FETCH_RESOURCES = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a source adds to the pod and to the runtime's container."""

    volumes: Sequence[Mapping[str, Any]] = ()
    mounts: Sequence[Mapping[str, Any]] = ()
    init_containers: Sequence[Mapping[str, Any]] = field(default=())


def model_files(
    source: ModelSource, image: str, env: Sequence[Mapping[str, Any]], security_context: Mapping[str, Any]
) -> ModelFiles:
    """`env` and `security_context` are the runtime container's own: HF_ENDPOINT and proxies hold for the download."""
    if source.persistent_volume_claim is not None:
        return _mounted(source.persistent_volume_claim)
    if source.hugging_face is not None:
        return _downloaded(source.hugging_face, image, env, security_context)
    return ModelFiles()


def downloads(source: ModelSource) -> bool:
    """Whether the pod must reach a hub."""
    return source.hugging_face is not None


def _mounted(claim: PersistentVolumeClaimSource) -> ModelFiles:
    volume = {"name": MODEL_VOLUME, "persistentVolumeClaim": {"claimName": claim.claim_name, "readOnly": True}}
    mount = {"name": MODEL_VOLUME, "mountPath": f"{IMAGE_MODEL_ROOT}/persistentVolumeClaim", "readOnly": True}
    return ModelFiles([volume], [mount])


def _downloaded(
    hub: HuggingFaceSource, image: str, env: Sequence[Mapping[str, Any]], security_context: Mapping[str, Any]
) -> ModelFiles:
    folder = f"{IMAGE_MODEL_ROOT}/huggingFace"
    args = ["fetch", f"--hugging-face={hub.repository}", f"--revision={hub.revision or DEFAULT_REVISION}"]
    volumes: list[Mapping[str, Any]] = [{"name": MODEL_VOLUME, "emptyDir": {}}]
    mounts: list[Mapping[str, Any]] = [{"name": MODEL_VOLUME, "mountPath": folder}]
    if (token := hub.token_secret_ref) is not None:
        items = [{"key": token.key, "path": "token"}]
        # 0440: the pod's fsGroup may read it, nobody else.
        volumes.append(
            {"name": TOKEN_VOLUME, "secret": {"secretName": token.name, "items": items, "defaultMode": 0o440}}
        )
        mounts.append({"name": TOKEN_VOLUME, "mountPath": TOKEN_FOLDER, "readOnly": True})
        args.append(f"--token-file={TOKEN_FOLDER}/token")
    fetch = {
        "name": FETCH_CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": [*args, f"--into={folder}"],
        "env": list(env),
        "resources": FETCH_RESOURCES,
        "terminationMessagePolicy": "File",
        "securityContext": dict(security_context),
        "volumeMounts": [*mounts, {"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
    }
    return ModelFiles(volumes, [{**mounts[0], "readOnly": True}], [fetch])
