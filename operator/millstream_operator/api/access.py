"""`spec.auth`: who may ask the model."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from millstream_operator.api.base import ApiModel
from millstream_operator.api.model import ObjectKey


class AuthMode(StrEnum):
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class Auth(ApiModel):
    """Who may ask the model. Without it everyone who reaches the Service may."""

    mode: AuthMode | None = Field(
        None,
        description="Enabled: a request needs an API key. Disabled: it needs none, and a Service of type NodePort or "
        "LoadBalancer is accepted without keys. Default: Enabled where apiKeysSecretRef is given.",
    )
    api_keys_secret_ref: ObjectKey | None = Field(
        None,
        description="Key of a Secret with the API keys: one per line, # begins a comment, at most 1000. A request "
        "sends one as Authorization: Bearer. The pods read the Secret again when it changes; nothing restarts.",
    )
