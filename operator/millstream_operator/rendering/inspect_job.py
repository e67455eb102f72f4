"""The Job that reads a model's shape where the operator cannot: with the namespace's token, login, volume, network.

    huggingFace, image       `millstream inspect --hugging-face=… | --image=…`     config.json and headers, no weights
    persistentVolumeClaim    `millstream inspect --path=…`                         the claim, mounted read-only
    local                    `millstream inspect --path=…`                         the folder in the runtime image
    model.configMapRef       `… --config=FILE`                                     a ConfigMap, mounted: no right on it

It runs as the model's pods do: their service account without a token, node selector, tolerations, environment and pull
Secrets, under the restricted profile. One Job is one attempt. Its name is derived from its content, so a change of how
the model is reached (another token, another mirror) makes another Job at once. The answer is the pod's termination
message, at most 4 KiB of JSON without secrets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.model import ModelSource, ObjectKey, PullPolicy
from millstream_operator.planning.requires import source_kind
from millstream_operator.planning.restart_fields import input_hash
from millstream_operator.rendering.job_pod import job_container, job_pod_spec
from millstream_operator.rendering.model_source import ModelFiles, fetch_resources, mounted, pull_secret_names
from millstream_operator.rendering.names import (
    ATTEMPT_LABEL,
    INSPECT_CONTAINER,
    INSPECTION_LABEL,
    INSPECTOR,
    ROLE_LABEL,
    child,
    common_labels,
)
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.runtime_config import IMAGE_MODEL_ROOT
from millstream_operator.rendering.source_access import source_access

DEADLINE_SECONDS = 3600  # a compressed layer must be read to its end, and a node may have to come up first
TTL_SECONDS = 3600  # the operator deletes a Job that it has read; this is for the time when there is no operator
HASH_LENGTH = 10
CONFIG_VOLUME = "model-config"
MODEL_FIELD = "model.source"
CONFIG_FOLDER = "/var/run/millstream/config"


@dataclass(frozen=True, slots=True)
class Subject:
    """A source to be inspected.

    `config`: a config.json that replaces the model's own; `field`: that of the source; `head_method`: the method of
    speculation whose draft head it must be, None: a model.
    """

    source: ModelSource
    config: ObjectKey | None = None
    field: str = MODEL_FIELD
    head_method: str | None = None

    @property
    def what(self) -> str:
        """The model, in words."""
        if self.head_method is not None:
            return "draft head"
        return "model" if self.field == MODEL_FIELD else "draft model"

    def __str__(self) -> str:
        """As a person writes it."""
        source = self.source
        if source.hugging_face is not None:
            return f"{source.hugging_face.repository} at {source.hugging_face.revision or 'main'}"
        if source.image is not None:
            return source.image.reference
        if (claim := source.persistent_volume_claim) is not None:
            return f"{claim.path or 'the root'} of the claim {claim.claim_name}"
        return source.local.path if source.local is not None else "nothing"


def inspection_key(owner: LLMDeployment, subject: Subject) -> str:
    """Return the key of an answer: ten hex digits of the source and its revision, as the spec names them.

    The token is not part of it, because it does not change the model. A runtime image that the spec names is, where it
    holds the model; the default image is not, or every upgrade of the operator would inspect again. A tag that must
    always be resolved counts as another source at each change of the spec.
    """
    source = subject.source
    named = source.model_dump(mode="json", by_alias=True, exclude_none=True)
    named.get("huggingFace", {}).pop("tokenSecretRef", None)
    if source.image is not None and named["image"].pop("pullPolicy", None) == PullPolicy.ALWAYS:
        named["spec"] = input_hash(owner)
    if source.local is not None and owner.spec.runtime is not None and owner.spec.runtime.image is not None:
        named["runtimeImage"] = owner.spec.runtime.image
    if subject.head_method is not None:  # an older runtime's answer about the same source says nothing of heads
        named["draftHead"] = True
    if subject.config is not None:
        named["config"] = subject.config.model_dump(mode="json", by_alias=True)
    return _digest(named)


def sharing_key(owner: LLMDeployment, subject: Subject, image: str) -> str:
    """Return the key by which one answer serves several LLMDeployments of a namespace.

    It has all by which the answer may differ: image, arguments, environment and volumes of the Job's pod, and so also
    the Secrets of token and logins. One object's HF_ENDPOINT or token decides nothing for an object that has another.
    The key of stored records has less: no upgrade, and no change of a token, inspects again.
    """
    pod = _pod_spec(owner, subject, image, PodDefaults())
    (container,) = pod["containers"]
    reached_by = {name: container[name] for name in ("image", "args", "env", "volumeMounts")}
    return _digest([inspection_key(owner, subject), reached_by, pod["volumes"]])


def inspect_job(
    owner: LLMDeployment, subject: Subject, image: str, defaults: PodDefaults, attempt: int = 1
) -> dict[str, Any]:
    """One attempt to inspect `subject` with the runtime image `image`."""
    labels = {INSPECTION_LABEL: inspection_key(owner, subject), ATTEMPT_LABEL: str(attempt)}
    template = {
        "metadata": {"labels": {**defaults.labels, **common_labels(owner.name), ROLE_LABEL: INSPECTOR, **labels}},
        "spec": _pod_spec(owner, subject, image, defaults),
    }
    job = child(owner, "batch/v1", "Job", name=f"{owner.name}-{_digest(template)}")
    job["metadata"]["labels"] |= {ROLE_LABEL: INSPECTOR, **labels}
    return job | {
        "spec": {
            "backoffLimit": 0,  # the operator tries again, with the reason in the status meanwhile
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": TTL_SECONDS,
            "template": template,
        }
    }


def _pod_spec(owner: LLMDeployment, subject: Subject, image: str, defaults: PodDefaults) -> dict[str, Any]:
    flags, files = _reach(owner, subject)
    container = job_container(
        owner, INSPECT_CONTAINER, image, ["inspect", *flags], fetch_resources(owner), files.mounts
    )
    near = subject.source.persistent_volume_claim is not None
    return job_pod_spec(owner, defaults, container, files, near_replicas=near)


def _reach(owner: LLMDeployment, subject: Subject) -> tuple[Sequence[str], ModelFiles]:
    """Return flags, volumes and mounts. Where a config replaces a folder, the folder itself is not needed."""
    source = subject.source
    flags: list[str] = []
    volumes: list[Mapping[str, Any]] = []
    mounts: list[Mapping[str, Any]] = []
    access = source_access(source, None, pull_secret_names(owner))
    if access is not None:
        flags, volumes, mounts = [*access.flags], [*access.volumes], [*access.mounts]
    elif subject.config is None and (claim := source.persistent_volume_claim) is not None:
        files = mounted(claim)
        volumes, mounts = [*files.volumes], [*files.mounts]
        below = f"/{claim.path.strip('/')}" if claim.path is not None else ""
        flags = [f"--path={IMAGE_MODEL_ROOT}/{source_kind(source)}{below}"]
    elif subject.config is None and source.local is not None:
        path = source.local.path.rstrip("/") or "/"
        flags = [f"--path={path if path.startswith('/') else f'{IMAGE_MODEL_ROOT}/{path}'}"]
    if (config := subject.config) is not None:
        path = f"{config.name}/{config.key}"
        items = [{"key": config.key, "path": path}]
        volumes.append({"name": CONFIG_VOLUME, "configMap": {"name": config.name, "items": items, "optional": True}})
        mounts.append({"name": CONFIG_VOLUME, "mountPath": CONFIG_FOLDER, "readOnly": True})
        flags.append(f"--config={CONFIG_FOLDER}/{path}")
    return flags, ModelFiles(volumes, mounts)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:HASH_LENGTH]
