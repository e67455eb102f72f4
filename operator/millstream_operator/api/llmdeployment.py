"""`LLMDeployment`: the object that a user applies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from millstream_operator.api.affinity import Namespace
from millstream_operator.api.base import AnnotationName, ApiModel, LabelValue, QualifiedName
from millstream_operator.api.spec import LLMDeploymentSpec

MAX_ANNOTATIONS_BYTES = 256 << 10  # of all keys and values of an object: the API server's own limit


def _within_limit(annotations: dict[str, str]) -> dict[str, str]:
    num_bytes = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    if num_bytes > MAX_ANNOTATIONS_BYTES:
        raise ValueError(f"it has {num_bytes} bytes; there may be {MAX_ANNOTATIONS_BYTES}")
    return annotations


class ObjectMeta(ApiModel):
    """The metadata that Millstream reads, and the names of the rest, so that a typing error is still caught.

    Names and labels are checked as the API server checks those of every object.
    """

    name: str = Field(min_length=1)
    generate_name: str | None = None
    namespace: Namespace | None = None
    labels: dict[QualifiedName, LabelValue] = Field(default_factory=dict)
    annotations: Annotated[dict[AnnotationName, str], AfterValidator(_within_limit)] = Field(default_factory=dict)
    uid: str | None = None
    generation: int | None = None
    resource_version: str | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    finalizers: list[str] = Field(default_factory=list)
    owner_references: list[dict[str, Any]] = Field(default_factory=list)
    managed_fields: list[dict[str, Any]] = Field(default_factory=list)
    self_link: str | None = None


class LLMDeployment(ApiModel):
    """One model behind one Service. The status is the operator's and is not read from manifests."""

    api_version: Literal["millstream.dev/v1alpha1"]
    kind: Literal["LLMDeployment"]
    metadata: ObjectMeta
    spec: LLMDeploymentSpec
    status: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def served_name(self) -> str:
        """The model's name in requests: `spec.model.servedName`, else the object's own name."""
        return self.spec.model.served_name or self.metadata.name
