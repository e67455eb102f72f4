"""Stage "prune": delete children that are ours and no longer wanted. `rollout/pruning.py` says which."""

from __future__ import annotations

from millstream_operator.children.children import Children
from millstream_operator.kube.kinds import CONFIG_MAP, OWNED, PERSISTENT_VOLUME_CLAIM
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


async def prune(context: ReconcileContext, children: Children) -> None:
    """Delete per kind; nothing at all where the wanted objects could not be applied."""
    if context.problem is not None:
        return
    owner, key, rollout, records = context.owner, context.key, context.rollout, context.records
    revisions = (rollout.pin, rollout.running, last_answered(records))
    keep = {one.revision.name for one in revisions if one is not None}
    to_delete = prunable_records(records, keep, digests_in_use(context.workload, context.pods))
    names = {record["metadata"]["name"] for record in to_delete}
    kept = [record for record in records if record["metadata"]["name"] not in names]
    applied = {(one["kind"], one["metadata"]["name"]) for one in context.wanted}
    all_pods = [*context.pods, *context.other_pods]
    maps = needed_maps(owner.name, kept, all_pods) | kept_inspections(children.list_owned(owner, key, CONFIG_MAP))
    for kind in OWNED:
        to_delete = prunable(kind, children.list_owned(owner, key, kind), applied, names, maps)
        if kind is PERSISTENT_VOLUME_CLAIM:
            to_delete = unmounted(to_delete, context.workload, all_pods)
        await children.delete(owner, to_delete)
