"""How much a pod downloads before it starts, and how long a rollout waits for that. Pure.

    time for the download = bytes of the checkpoint / MIN_BYTES_PER_SECOND, in whole minutes

A pod keeps what was known when it was planned, so the time does not change while it runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from millstream_operator.rendering.model_source import DRAFT_MODEL_VOLUME, MODEL_VOLUME
from millstream_operator.rendering.names import DRAFT_FETCH_CONTAINER, FETCH_CONTAINER

# 400 Mbit/s: what a hub, a registry and a busy node's network are assumed to give at least, together.
MIN_BYTES_PER_SECOND = 50_000_000
# init container -> volume, and the weights in the plan's ledger
_DOWNLOADS = {
    FETCH_CONTAINER: (MODEL_VOLUME, ("weightsBytes", "embeddingsBytes")),
    DRAFT_FETCH_CONTAINER: (DRAFT_MODEL_VOLUME, ("draftWeightsBytes",)),
}
_AMOUNT = re.compile(r"(\d+)(Ki|Mi|Gi|Ti)?")
_UNITS = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def download_seconds(plan: Mapping[str, Any], pod: Mapping[str, Any]) -> int:
    """Return the time for the downloads of a revision's models; 0 where nothing is downloaded or nothing is known.

    `plan` is its `status.plan`, `pod` the pod or the revision's PodTemplateSpec. Less than three gigabytes have no time
    of their own.
    """
    return download_bytes(plan, pod) // MIN_BYTES_PER_SECOND // 60 * 60


def download_bytes(plan: Mapping[str, Any], pod: Mapping[str, Any]) -> int:
    """Return the bytes of the downloads, of a model and its draft: one follows the other.

    By the limits of their volumes where these have one, else by the weights of all GPUs.
    """
    spec = pod.get("spec") or {}
    names = {one.get("name") for one in spec.get("initContainers") or ()}
    found = [_DOWNLOADS[name] for name in _DOWNLOADS if name in names]
    volumes = {volume for volume, _ in found}
    limits = [
        _bytes((one.get("emptyDir") or {}).get("sizeLimit"))
        for one in spec.get("volumes") or ()
        if one.get("name") in volumes
    ]
    ledger = plan.get("memory") or {}
    weights = sum(ledger.get(part) or 0 for _, parts in found for part in parts)
    return max(weights * max(1, plan.get("gpusPerReplica") or 1), sum(limits))


def _bytes(amount: object) -> int:
    found = _AMOUNT.fullmatch(amount) if isinstance(amount, str) else None
    return int(found[1]) * _UNITS[found[2]] if found is not None else 0
