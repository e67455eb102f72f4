"""The pods' identity: an account of their own, without any right and without a token in the pod."""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.names import child


def service_account(owner: LLMDeployment) -> dict[str, Any]:
    return child(owner, "v1", "ServiceAccount") | {"automountServiceAccountToken": False}
