"""Plans that are pinned without a cluster: from the spec alone, or from facts that a test gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.revision import Revision
from millstream_operator.rollout.pinning import Pinning
from millstream_operator.rollout.revisions import PinnedRevision, pinned, plan_anew

Manifest = dict[str, Any]


class NoFacts:
    """A FactsSource that knows nothing: plans come from the spec alone."""

    stamp = 0
    lacks_gpus = False

    def of(self, owner: LLMDeployment) -> Facts:
        return Facts()

    def promise(self, owner: LLMDeployment, revision: Revision) -> None:
        """Nothing to do: no GPUs are counted."""

    def holds_gpus(self, owner: LLMDeployment, digest: str | None = None) -> bool:
        return False

    def could_start(self, owner: LLMDeployment, revision: Revision, *, give_up: bool) -> bool:
        return True


def choose(
    owner: LLMDeployment,
    plan_defaults: PlanDefaults,
    pod_defaults: PodDefaults,
    stored: Iterable[Manifest],
    facts: Facts | None = None,
) -> PinnedRevision:
    """The pinned revision among the stored records, or one that is planned now."""
    records = list(stored)
    return pinned(owner, records) or plan_anew(owner, plan_defaults, pod_defaults, records, facts or Facts())


def chosen_pin(pinning: Pinning, owner: LLMDeployment, records: list[Manifest]) -> PinnedRevision:
    """What the plan stage chooses for these records."""
    return pinning.choose(owner, records, pinned(owner, records)).pin
