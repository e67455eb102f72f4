"""`LLMDeployment`: the object that a user applies."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from millstream_operator.api.base import ApiModel
from millstream_operator.api.spec import LLMDeploymentSpec


class ObjectMeta(ApiModel):
    """The metadata that Millstream reads, and the names of the rest, so that a typing error is still caught."""

    name: str = Field(min_length=1)
    generate_name: str | None = None
    namespace: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
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
