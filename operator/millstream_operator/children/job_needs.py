"""What the pod of a Job needs besides the Job: an account, and a NetworkPolicy where the namespace denies traffic."""

from __future__ import annotations

from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.children.children import Children
from millstream_operator.kube.index import OwnerKey
from millstream_operator.kube.kinds import NETWORK_POLICY
from millstream_operator.rendering.network_policy import network_policy, spec_downloads
from millstream_operator.rendering.service_account import service_account
from millstream_operator.rendering.surroundings import Surroundings

Manifest = dict[str, Any]


def needed_by_job(children: Children, owner: LLMDeployment, key: OwnerKey, around: Surroundings) -> list[Manifest]:
    """Return the objects in the order in which they are applied: also while the Job waits, somebody may delete one.

    A policy that exists stays as it is where the spec downloads nothing: pods of an older revision may still download.
    """
    account = service_account(owner)
    is_enough = not spec_downloads(owner) and children.get_owned(owner, key, NETWORK_POLICY) is not None
    policy = network_policy(owner, around.network, around.operator_namespace, around.api_servers)
    return [account] if is_enough or policy is None else [account, policy]
