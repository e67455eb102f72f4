"""How a new revision reaches the pods: with one more pod for a while, or in place of an old one. Pure.

    Availability     one pod more than wanted comes up first, none that serves is taken away before
    ResourceAware    one pod is drained first, and the new one takes its GPUs

Replicas that fill every GPU can never be updated by a surge: the new pod waits for a GPU that only an old one can
give up, for ever (KubeRay 4239, KServe 5452). So `Auto` looks first whether a GPU is spare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.spec import Rollout, RolloutStrategy
from millstream_operator.api.status import AppliedStrategy


def asked_strategy(owner: LLMDeployment) -> AppliedStrategy | None:
    """What the spec insists on; None for Auto."""
    asked = (owner.spec.rollout or Rollout()).strategy or RolloutStrategy.AUTO
    return None if asked is RolloutStrategy.AUTO else AppliedStrategy(asked.value)


def rollout_strategy(owner: LLMDeployment, plan: Mapping[str, Any], spare: bool | None) -> AppliedStrategy:
    """The strategy to begin with.

    `plan` is `status.plan` of the new revision. `spare`: whether the GPUs for one more of its replicas are free. None:
    not known, so a surge is tried, and replaced by ResourceAware if its pod finds no GPU (`rollout/rollout.py`).
    """
    if (asked := asked_strategy(owner)) is not None:
        return asked
    on_cpu = not plan.get("gpusPerReplica")
    return AppliedStrategy.AVAILABILITY if on_cpu or spare is not False else AppliedStrategy.RESOURCE_AWARE


def certainly_surges(owner: LLMDeployment, plan: Mapping[str, Any]) -> bool:
    """Whether a rollout of this `status.plan` runs one pod more than wanted, whatever the cluster has room for."""
    asked = asked_strategy(owner)
    return asked is AppliedStrategy.AVAILABILITY or (asked is None and not plan.get("gpusPerReplica"))
