"""`spec.model`: which model, and where its weights come from.

All four sources can be planned. `millstream_runtime.config.CAPABILITIES` says which of them can reach a pod;
the others are refused when they are applied, by a condition that says so.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from millstream_operator.api.base import ApiModel, DNSSubdomain

# Segments never start with a dot, so neither `..` nor a hidden folder can be named.
_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
MODEL_PATH_PATTERN = rf"^/?{_SEGMENT}(/{_SEGMENT})*/?$"
IMAGE_PATTERN = (
    r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?(@sha256:[0-9a-f]{64})?$"
)
REPOSITORY_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9][A-Za-z0-9._-]{0,63})?$"
STORAGE_PATTERN = r"^[1-9][0-9]{0,14}(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
REVISION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"
Image = Annotated[str, StringConstraints(pattern=IMAGE_PATTERN, min_length=1, max_length=512)]


class ObjectKey(ApiModel):
    """One key of a Secret or ConfigMap in the LLMDeployment's own namespace."""

    name: DNSSubdomain = Field(description="Name of the Secret or ConfigMap.")
    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", min_length=1, max_length=253)] = Field(
        description="Key in that Secret or ConfigMap."
    )


class LocalSource(ApiModel):
    """A model folder that is already inside the runtime image. Never a folder of the node."""

    path: Annotated[str, StringConstraints(pattern=MODEL_PATH_PATTERN, min_length=1, max_length=512)] = Field(
        description=(
            "Folder with config.json, *.safetensors and tokenizer.json, or with a *.gguf file. Relative to the image's "
            "model root (/models), or absolute; no segment starts with a dot."
        )
    )


class HuggingFaceSource(ApiModel):
    """A repository of a Hugging Face hub. Each pod downloads it before the runtime starts, verified by digest."""

    repository: Annotated[str, StringConstraints(pattern=REPOSITORY_PATTERN, min_length=3, max_length=200)] = Field(
        description="Repository as org/name; one of several GGUF files by a word of its name: org/name:Q4_K_M."
    )
    revision: Annotated[str, StringConstraints(pattern=REVISION_PATTERN, min_length=1, max_length=128)] | None = Field(
        None, description="Branch, tag or commit, in quotes. Default: main."
    )
    token_secret_ref: ObjectKey | None = Field(None, description="Key of a Secret that holds a token of the hub.")


class PersistentVolumeClaimSource(ApiModel):
    """A model folder in a volume of the namespace, mounted to be read."""

    claim_name: DNSSubdomain = Field(description="Name of the PersistentVolumeClaim.")
    path: Annotated[str, StringConstraints(pattern=MODEL_PATH_PATTERN, min_length=1, max_length=512)] | None = Field(
        None, description="Folder in the volume. Default: its root."
    )


class PullPolicy(StrEnum):
    """When a tag is looked up. `Never` is refused by a rule: nothing but our own pods pulls a model."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class ImageSource(ApiModel):
    """An image or artifact whose files are the model. Pods pull it by digest, so that all run the same weights."""

    reference: Image = Field(description="Image with the model's files, by tag or digest.")
    pull_policy: PullPolicy | None = Field(
        None,
        description="IfNotPresent: a tag is resolved to a digest once and kept. Always: it is resolved anew with every "
        "change of the spec that reaches the pods. Default: IfNotPresent.",
    )


class ModelSource(ApiModel):
    """Where the weights come from: exactly one source."""

    local: LocalSource | None = Field(None, description="A folder inside the runtime image.")
    hugging_face: HuggingFaceSource | None = Field(None, description="A repository of a Hugging Face hub.")
    image: ImageSource | None = Field(None, description="An image whose files are the model.")
    persistent_volume_claim: PersistentVolumeClaimSource | None = Field(
        None, description="A folder in a volume of the namespace."
    )


class CacheAccessMode(StrEnum):
    READ_WRITE_MANY = "ReadWriteMany"
    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_WRITE_ONCE_POD = "ReadWriteOncePod"


class ModelCache(ApiModel):
    """A volume of the LLMDeployment's own for what is downloaded: the pods share one download."""

    size: Annotated[str, StringConstraints(pattern=STORAGE_PATTERN, min_length=1, max_length=32)] = Field(
        description="Size, for example 200Gi: room for two revisions of the model. It may grow and never shrink."
    )
    storage_class_name: DNSSubdomain | None = Field(
        None, description="StorageClass of the volume; it cannot change. Default: the cluster's own."
    )
    access_mode: CacheAccessMode | None = Field(
        None,
        description="ReadWriteMany, or, where all pods are on one node, ReadWriteOnce or ReadWriteOncePod; it cannot "
        "change. Default: ReadWriteMany.",
    )


class Model(ApiModel):
    """The model to serve."""

    served_name: (
        Annotated[
            str,
            StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?$", min_length=1, max_length=253),
        ]
        | None
    ) = Field(None, description="Name of the model in requests and in /v1/models. Default: metadata.name.")
    source: ModelSource = Field(description="Where the weights come from: exactly one source.")
    config_map_ref: ObjectKey | None = Field(
        None, description="Key of a ConfigMap that holds the model's config.json, where the source cannot be read."
    )
    cache: ModelCache | None = Field(
        None, description="A volume for what is downloaded. Default: each pod downloads for itself, to its node's disk."
    )
