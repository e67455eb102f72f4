"""Which children are no longer wanted. Pure.

    records, ConfigMaps and pods that exist, what shall run -> what to delete

A record is deleted when the history is full, by number or by bytes, and its boot ConfigMap with it. Neither is deleted
while a pod runs the revision: the kubelet could not start the pod's successor, and the rollout could not go back.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from millstream_operator.diagnosis.pod_facts import claims, digest_of_pod
from millstream_operator.kube.kinds import CONFIG_MAP, CONTROLLER_REVISION, Kind
from millstream_operator.kube.large_records import is_thin
from millstream_operator.rendering.config_maps import boot_map_name, mounted_maps
from millstream_operator.rendering.names import INSPECTOR, LEADER, REVISION_LABEL, role_of
from millstream_operator.rendering.revision import Revision, read_revision
from millstream_operator.rollout.revisions import newest_first, read_pin
from millstream_operator.workloads.workload import WorkloadState

Manifest = dict[str, Any]
PRUNED_ROLES = frozenset({LEADER, INSPECTOR})  # objects of any other role are deleted by whoever made them
HISTORY_LIMIT = 4  # records kept, the current one included
HISTORY_BYTES = 256 << 10  # of the records together; of large ones fewer are kept


def digests_in_use(state: WorkloadState | None, pods: Iterable[Manifest]) -> set[str]:
    """Digests of the revisions that pods run, or that the workload may create pods of at any moment."""
    found = {digest_of_pod(pod) for pod in pods} | ({state.digest} if state is not None else set())
    return {digest for digest in found if digest is not None}


def also_running(records: Iterable[Manifest], in_use: Collection[str], wanted: Revision) -> list[Revision]:
    """Older revisions that still have pods."""
    readable = [read_revision(record) for record in newest_first(records)]
    return [one for one in readable if one is not None and one.digest in in_use and one.digest != wanted.digest]


def prunable_records(
    records: Iterable[Manifest], keep: Collection[str], in_use: Collection[str] = ()
) -> list[Manifest]:
    """Records beyond the history's limits, oldest last; never one of the names in `keep`, nor what pods run."""
    newest = newest_first(records)
    others = [record for record in newest if record["metadata"]["name"] not in keep]
    run = _records_that_run(newest, in_use)
    num_kept = max(0, min(HISTORY_LIMIT - len(keep), _num_within_bytes(newest, keep, others)))
    return [one for one in others[num_kept:] if one["metadata"]["name"] not in run]


def _num_within_bytes(newest: Sequence[Manifest], keep: Collection[str], others: Sequence[Manifest]) -> int:
    """How many of `others`, the newest first, are within HISTORY_BYTES together with those of `keep`."""
    left = HISTORY_BYTES - sum(_num_bytes(record) for record in newest if record["metadata"]["name"] in keep)
    for place, record in enumerate(others[:HISTORY_LIMIT]):
        left -= _num_bytes(record)
        if left < 0:
            return place
    return len(others)


def _num_bytes(record: Manifest) -> int:
    """Length of the record's data as JSON. What the index holds without data was too large to be held."""
    if is_thin(record):
        return HISTORY_BYTES
    return len(json.dumps(record["data"], ensure_ascii=False).encode())


def _records_that_run(newest_first: Iterable[Manifest], in_use: Collection[str]) -> set[str]:
    """Of each digest in use the newest record, and the newest that answered.

    An edit that changes no pod, of the budget say, makes another record of the same digest.
    """
    kept: dict[tuple[str, bool], str] = {}
    for record in newest_first:
        digest, pin = record["metadata"]["labels"].get(REVISION_LABEL), read_pin(record)
        if digest in in_use:
            kept.setdefault((digest, False), record["metadata"]["name"])
            if pin is not None and pin.marks.answered:
                kept.setdefault((digest, True), record["metadata"]["name"])
    return set(kept.values())


def prunable(
    kind: Kind,
    mine: Sequence[Manifest],
    wanted: Collection[tuple[str, str]],
    records_to_delete: Collection[str],
    needed_maps: Collection[str],
) -> list[Manifest]:
    """Children of a kind to delete. `wanted`: (kind, name) of what is applied."""
    if kind is CONTROLLER_REVISION:
        return [record for record in mine if record["metadata"]["name"] in records_to_delete]
    ours = [child for child in mine if role_of(child) in PRUNED_ROLES]
    unwanted = [child for child in ours if (kind.kind, child["metadata"]["name"]) not in wanted]
    if kind is CONFIG_MAP:
        return [child for child in unwanted if child["metadata"]["name"] not in needed_maps]
    return unwanted


def unmounted(volumes: Iterable[Manifest], makers: Iterable[Manifest]) -> list[Manifest]:
    """Claims that none of the pods and pod templates mounts: a revision may outlive the spec that it is of."""
    mounted = {name for maker in makers for name in claims(maker)}
    return [claim for claim in volumes if claim["metadata"]["name"] not in mounted]


def needed_maps(owner_name: str, kept_records: Iterable[Manifest], pods: Iterable[Manifest]) -> set[str]:
    """ConfigMaps of the records that stay, and those that pods mount."""
    revisions = [read_revision(record) for record in kept_records]
    named = {boot_map_name(owner_name, one.config_hash) for one in revisions if one is not None and one.boot}
    return named | mounted_maps(pods)
