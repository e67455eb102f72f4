"""Plans that were made without knowing the GPUs, and whose pods never answered: better facts replace them. Pure.

never answered, no pod bound to a node                    -> the plan from today's facts
never answered, pods bound, another number of GPUs        -> the same: what runs cannot be what is needed
never answered, pods bound, the same number of GPUs       -> kept: it may be loading
answered                                                  -> kept; PlanOutdated says what a new plan would gain
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream_operator.api.spec import AcceleratorType
from millstream_operator.planning.plan import Plan
from millstream_operator.rollout.revisions import PinnedRevision

LAYOUT_FIELDS = ("gpusPerReplica", "tensorParallelSize", "pipelineParallelSize", "quantization")


def is_unproven(kept: PinnedRevision) -> bool:
    """Whether a plan names no product (`accelerator: GPU`) and its pods never answered through the Service."""
    return is_blind(kept.revision.plan) and not kept.marks.answered


def is_blind(plan: Mapping[str, Any]) -> bool:
    """Whether a `status.plan` was made without knowing the GPUs."""
    return plan.get("accelerator") == AcceleratorType.GPU.value


def is_replaced_by(kept: PinnedRevision, today: Plan, holds_gpus: bool) -> bool:
    """Whether today's plan takes the place of an unproven one. `holds_gpus`: a pod of it is bound to a node."""
    before, after = kept.revision.plan, today.status_plan()
    return today.product is not None and (
        not holds_gpus or any(before.get(name) != after.get(name) for name in LAYOUT_FIELDS)
    )
