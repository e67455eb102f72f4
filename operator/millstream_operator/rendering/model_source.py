"""How the model's files get into the pod: from the image, a mounted volume, or a download before the runtime starts.

    local                   in the image            /models/<path>
    persistentVolumeClaim   mounted, read-only      /models/persistentVolumeClaim/<path>
    huggingFace, image      `millstream fetch`      /models/<source>, an emptyDir: each pod downloads for itself
    … with model.cache      `millstream fetch`      /models/<source>/<model>-<revision>, in a volume that all pods share
    quantized by a Job      mounted, read-only      /models/quantized/<method>-<digest>, in the same volume
    a draft tuned by a Job  mounted, read-only      /models/tuned/draft-<digest>, in the same volume

The download is an init container with the runtime's image. It verifies every file and continues where it stopped when
it is restarted; the reason of a failure is in its termination message, as with the runtime. The download is pinned to
the commit or digest that the inspection found, so that every pod of a revision, today or next month, has the same.
A draft model gets there in the same way, below /models/draft, in volumes and containers with a `draft-` before their
names, by the same builders. With model.cache both are in its volume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.model import ModelSource, PersistentVolumeClaimSource
from millstream_operator.api.quantity import canonical
from millstream_operator.planning.made_model import QUANTIZED_FOLDER, made_method
from millstream_operator.planning.model_path import DRAFT_FOLDER, TUNED_FOLDER
from millstream_operator.planning.plan import Plan, ResourcePlan
from millstream_operator.planning.pod_resources import download_of
from millstream_operator.planning.requires import draft_source, source_kind
from millstream_operator.rendering.container_resources import container_resources
from millstream_operator.rendering.model_cache import cache_claim_name
from millstream_operator.rendering.names import FETCH_CONTAINER
from millstream_operator.rendering.runtime_config import IMAGE_MODEL_ROOT
from millstream_operator.rendering.source_access import SourceAccess, source_access

MODEL_VOLUME, DRAFT_MODEL_VOLUME = "model", "draft-model"
# Without this the kubelet would walk through the whole volume at each start of a pod.
_CACHED_SECURITY = {"fsGroupChangePolicy": "OnRootMismatch"}
# The measured peak of `millstream fetch` is 30 MB. It hashes and unpacks what it downloads, with one thread per file.
FETCH_RESOURCES = ResourcePlan(
    {"cpu": "100m", "memory": "128Mi", "ephemeral-storage": "256Mi"},
    {"cpu": "4", "memory": "512Mi", "ephemeral-storage": "2304Mi"},
)


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
    container, image = {"env": list(env), "securityContext": dict(security_context)}, plan.runtime_image
    model = SourceFiles(owner.spec.model.source, plan.model_path, plan.model_revision, plan.checkpoint_bytes)
    is_made = made_method(owner.spec) is not None
    files = made_files(owner) if is_made else source_files(owner, image, model, container)
    if (source := draft_source(owner.spec)) is None or plan.draft is None:
        return files
    if plan.draft.tuned is not None:
        return together(files, tuned_files(owner))
    draft = SourceFiles(source, plan.draft.path, plan.draft.revision, plan.draft.checkpoint_bytes, DRAFT_FOLDER)
    return together(files, source_files(owner, image, draft, container))


def made_files(owner: LLMDeployment, *, read_only: bool = True) -> ModelFiles:
    """The folder of what the cluster quantizes: in the volume of `model.cache`."""
    return _folder_in_cache(owner, QUANTIZED_FOLDER, read_only=read_only)


def tuned_files(owner: LLMDeployment, *, read_only: bool = True) -> ModelFiles:
    """The folder of drafts that the cluster tunes: in the same volume."""
    return _folder_in_cache(owner, TUNED_FOLDER, read_only=read_only)


def _folder_in_cache(owner: LLMDeployment, name: str, *, read_only: bool) -> ModelFiles:
    mount = {"name": name, "mountPath": f"{IMAGE_MODEL_ROOT}/{name}"}
    mounts = [{**mount, "readOnly": True} if read_only else mount]
    return ModelFiles([{"name": name, **_cache(owner)}], mounts, (), _CACHED_SECURITY)


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """A model and where it goes. `prefix`: of names in the pod, and the folder below the model root; "": the target."""

    source: ModelSource
    path: str
    revision: str | None
    checkpoint_bytes: int | None
    prefix: str = ""

    @property
    def mount_path(self) -> str:
        return "/".join(filter(None, (IMAGE_MODEL_ROOT, self.prefix, source_kind(self.source))))

    def named(self, name: str) -> str:
        return f"{self.prefix}-{name}" if self.prefix else name


def source_files(owner: LLMDeployment, image: str, model: SourceFiles, container: Mapping[str, Any]) -> ModelFiles:
    """How one source gets into a pod. `image`: of the download; `container`: what every container has."""
    if model.source.persistent_volume_claim is not None:
        return mounted(model.source.persistent_volume_claim, model.named(MODEL_VOLUME), model.mount_path)
    access = source_access(model.source, model.revision, pull_secret_names(owner))
    return _downloaded(owner, image, model, access, container) if access is not None else ModelFiles()


def together(one: ModelFiles, other: ModelFiles) -> ModelFiles:
    return ModelFiles(
        [*one.volumes, *other.volumes],
        [*one.mounts, *other.mounts],
        [*one.init_containers, *other.init_containers],
        {**one.pod_security, **other.pod_security},
    )


def downloads(source: ModelSource) -> bool:
    """Whether the pod must reach a hub or a registry."""
    return source.hugging_face is not None or source.image is not None


def pull_secret_names(owner: LLMDeployment) -> list[str]:
    """Image pull Secrets of the pods, in their order: they are logins for a model's image too."""
    spec = owner.spec.pod_template.spec if owner.spec.pod_template is not None else None
    return [secret.name for secret in (spec.image_pull_secrets if spec is not None else None) or []]


def mounted(
    claim: PersistentVolumeClaimSource,
    volume_name: str = MODEL_VOLUME,
    mount_path: str = f"{IMAGE_MODEL_ROOT}/persistentVolumeClaim",
) -> ModelFiles:
    volume = {"name": volume_name, "persistentVolumeClaim": {"claimName": claim.claim_name, "readOnly": True}}
    mount = {"name": volume_name, "mountPath": mount_path, "readOnly": True}
    return ModelFiles([volume], [mount])


def _downloaded(
    owner: LLMDeployment, image: str, model: SourceFiles, access: SourceAccess, container: Mapping[str, Any]
) -> ModelFiles:
    source, cached, name = model.source, owner.spec.model.cache is not None, model.named(MODEL_VOLUME)
    volume = {"name": name, **(_cache(owner) if cached else _scratch(source, model.checkpoint_bytes))}
    mount = {"name": name, "mountPath": model.mount_path}
    credentials = [{**one, "name": model.named(one["name"])} for one in access.volumes]
    credential_mounts = [{**one, "name": model.named(one["name"])} for one in access.mounts]
    fetch = {
        "name": model.named(FETCH_CONTAINER),
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["fetch", *access.flags, f"--into={IMAGE_MODEL_ROOT}/{model.path}"],
        **container,
        "resources": fetch_resources(owner),
        "terminationMessagePolicy": "File",
        "volumeMounts": [mount, *credential_mounts, {"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
    }
    security = _CACHED_SECURITY if cached else {}
    return ModelFiles([volume, *credentials], [{**mount, "readOnly": True}], [fetch], security)


def _cache(owner: LLMDeployment) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": cache_claim_name(owner)}}


def _scratch(source: ModelSource, checkpoint_bytes: int | None) -> dict[str, Any]:
    """Return an emptyDir with a size limit: only a pod that exceeds it is evicted."""
    limit_mib = -(-download_of(source, checkpoint_bytes).limit_bytes // (1 << 20))
    return {"emptyDir": {"sizeLimit": canonical(f"{limit_mib}Mi")}}


def fetch_resources(owner: LLMDeployment) -> dict[str, Any]:
    """Return the resources of the download, and of the Job that inspects the model: the same command's work."""
    pod = owner.spec.pod_template.spec if owner.spec.pod_template is not None else None
    overlay = next((one for one in (pod.init_containers if pod else None) or () if one.name == FETCH_CONTAINER), None)
    return container_resources(FETCH_RESOURCES, overlay.resources if overlay is not None else None)
