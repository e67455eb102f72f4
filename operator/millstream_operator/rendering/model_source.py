"""How the model's files get into the pod: from the image, a mounted volume, or a download before the runtime starts.

    local                   in the image            /models/<path>
    persistentVolumeClaim   mounted, read-only      /models/persistentVolumeClaim/<path>
    huggingFace, image      `millstream fetch`      /models/<source>, an emptyDir: each pod downloads for itself
    … with model.cache      `millstream fetch`      /models/<source>/<model>-<revision>, in a volume that all pods share

The download is an init container with the runtime's image. It verifies every file and continues where it stopped when
it is restarted; the reason of a failure is in its termination message, as with the runtime. The download is pinned to
the commit or digest that the inspection found, so that every pod of a revision, today or next month, has the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.model import ModelSource, PersistentVolumeClaimSource
from millstream_operator.planning.plan import Plan
from millstream_operator.planning.requires import source_kind
from millstream_operator.rendering.model_cache import cache_claim_name
from millstream_operator.rendering.names import FETCH_CONTAINER
from millstream_operator.rendering.quantity import canonical
from millstream_operator.rendering.runtime_config import IMAGE_MODEL_ROOT
from millstream_operator.rendering.source_access import SourceAccess, source_access

MODEL_VOLUME = "model"
# The measured peak of `millstream fetch` is 30 MB; the limit keeps a namespace's LimitRange from choosing another.
FETCH_RESOURCES = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}
SPARE_MIB = 1024  # besides the weights: tokenizer, configuration, file system overhead


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a source adds to the pod and to the runtime's container."""

    volumes: Sequence[Mapping[str, Any]] = ()
    mounts: Sequence[Mapping[str, Any]] = ()
    init_containers: Sequence[Mapping[str, Any]] = field(default=())
    pod_security: Mapping[str, Any] = field(default_factory=dict)


def model_files(
    owner: LLMDeployment, plan: Plan, env: Sequence[Mapping[str, Any]], security_context: Mapping[str, Any]
) -> ModelFiles:
    """`env` and `security_context` are the runtime container's own: HF_ENDPOINT and proxies hold for the download."""
    source = owner.spec.model.source
    if source.persistent_volume_claim is not None:
        return mounted(source.persistent_volume_claim)
    access = source_access(source, plan.model_revision, pull_secret_names(owner))
    if access is None:
        return ModelFiles()
    return _downloaded(owner, plan, access, {"env": list(env), "securityContext": dict(security_context)})


def downloads(source: ModelSource) -> bool:
    """Whether the pod must reach a hub or a registry."""
    return source.hugging_face is not None or source.image is not None


def pull_secret_names(owner: LLMDeployment) -> list[str]:
    """Image pull Secrets of the pods, in their order: they are logins for a model's image too."""
    spec = owner.spec.pod_template.spec if owner.spec.pod_template is not None else None
    return [secret.name for secret in (spec.image_pull_secrets if spec is not None else None) or []]


def mounted(claim: PersistentVolumeClaimSource) -> ModelFiles:
    volume = {"name": MODEL_VOLUME, "persistentVolumeClaim": {"claimName": claim.claim_name, "readOnly": True}}
    mount = {"name": MODEL_VOLUME, "mountPath": f"{IMAGE_MODEL_ROOT}/persistentVolumeClaim", "readOnly": True}
    return ModelFiles([volume], [mount])


def _downloaded(owner: LLMDeployment, plan: Plan, access: SourceAccess, container: Mapping[str, Any]) -> ModelFiles:
    source, cached = owner.spec.model.source, owner.spec.model.cache is not None
    volume = {"name": MODEL_VOLUME, **(_cache(owner) if cached else _scratch(source, plan.checkpoint_bytes))}
    mount = {"name": MODEL_VOLUME, "mountPath": f"{IMAGE_MODEL_ROOT}/{source_kind(source)}"}
    fetch = {
        "name": FETCH_CONTAINER,
        "image": plan.runtime_image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["fetch", *access.flags, f"--into={IMAGE_MODEL_ROOT}/{plan.model_path}"],
        **container,
        "resources": FETCH_RESOURCES,
        "terminationMessagePolicy": "File",
        "volumeMounts": [mount, *access.mounts, {"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
    }
    # Without this the kubelet would walk through the whole volume at each start of a pod.
    security = {"fsGroupChangePolicy": "OnRootMismatch"} if cached else {}
    return ModelFiles([volume, *access.volumes], [{**mount, "readOnly": True}], [fetch], security)


def _cache(owner: LLMDeployment) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": cache_claim_name(owner)}}


def _scratch(source: ModelSource, checkpoint_bytes: int | None) -> dict[str, Any]:
    """Return an emptyDir, with a limit where the size is known: only a pod that exceeds it is evicted."""
    if not checkpoint_bytes:
        return {"emptyDir": {}}
    copies = 2 if source.image is not None else 1  # a layer lies there packed and unpacked
    limit_mib = -(-copies * checkpoint_bytes // (1 << 20)) + SPARE_MIB
    return {"emptyDir": {"sizeLimit": canonical(f"{limit_mib}Mi")}}
