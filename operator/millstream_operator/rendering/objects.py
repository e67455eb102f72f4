"""All objects that one LLMDeployment should own besides its revisions, in the order in which they are applied."""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.rendering.deployment import deployment
from millstream_operator.rendering.model_cache import model_cache
from millstream_operator.rendering.network_policy import network_policy
from millstream_operator.rendering.pod_disruption_budget import pod_disruption_budget
from millstream_operator.rendering.revision import Revision
from millstream_operator.rendering.service import service
from millstream_operator.rendering.service_account import service_account


def objects(owner: LLMDeployment, revision: Revision) -> list[dict[str, Any]]:
    """What a pod needs comes before the Deployment that makes pods."""
    wanted = [
        service_account(owner),
        network_policy(owner),
        service(owner),
        pod_disruption_budget(owner),
        model_cache(owner),
        deployment(owner, revision.template),
    ]
    return [rendered for rendered in wanted if rendered is not None]
