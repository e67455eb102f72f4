"""Stage "prune": delete children that are ours and no longer wanted. `rollout/pruning.py` says which.

Where an object is refused, the history alone is pruned: a refusal may last, and each edit of the spec adds to it.
"""

from __future__ import annotations

from millstream_operator.children.children import Children
from millstream_operator.kube.kinds import CONFIG_MAP, CONTROLLER_REVISION, OWNED, PERSISTENT_VOLUME_CLAIM
from millstream_operator.reconciling.context import ReconcileContext
from millstream_operator.rendering.inspection_record import kept_inspections
from millstream_operator.rollout.pruning import (
    digests_in_use,
    needed_maps,
    prunable,
    prunable_records,
    unmounted,
)
from millstream_operator.rollout.revisions import last_answered

HISTORY = (CONTROLLER_REVISION, CONFIG_MAP)  # what revisions leave behind


async def prune(context: ReconcileContext, children: Children) -> None:
    """Delete per kind; of the history alone where the wanted objects could not be applied."""
    owner, key, rollout, records = context.owner, context.key, context.rollout, context.records
    good = last_answered(records)  # what a failed revision goes back to
    revisions = (rollout.pin, rollout.running, good)
    keep = {one.revision.name for one in revisions if one is not None}
    to_delete = prunable_records(records, keep, digests_in_use(context.state, context.pods))
    names = {record["metadata"]["name"] for record in to_delete}
    kept = [record for record in records if record["metadata"]["name"] not in names]
    applied = {(one["kind"], one["metadata"]["name"]) for one in context.wanted}
    templates = context.workloads.templates(context.workload) if context.workload is not None else ()
    makers = [*context.pods, *context.other_pods, *templates]
    maps = needed_maps(owner.name, kept, makers) | kept_inspections(children.list_owned(owner, key, CONFIG_MAP))
    for kind in OWNED if context.problem is None else HISTORY:
        to_delete = prunable(kind, children.list_owned(owner, key, kind), applied, names, maps)
        if kind is PERSISTENT_VOLUME_CLAIM:
            needed = makers if good is None else [*makers, good.revision.template]
            to_delete = unmounted(to_delete, needed)
        await children.delete(owner, to_delete)
