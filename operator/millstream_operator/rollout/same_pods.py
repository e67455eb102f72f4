"""Whether two revisions make the same pods, resources aside. Pure.

Requests, limits and size limits of volumes follow from the plan and from formulas of this version. A better formula is
no reason to restart a pod that serves, and no reason to call its plan outdated: the pod gets it with its next plan.
What podTemplate says of resources is in the spec's hash. Kueue's queue is left out, too: it changes while no pod is
ready (`queue_changes.py`).
"""

from __future__ import annotations

from typing import Any

from millstream_operator.rendering.kueue import QUEUE_LABEL
from millstream_operator.rendering.names import REVISION_LABEL
from millstream_operator.rendering.revision import Revision

Manifest = dict[str, Any]
CONTAINERS = ("containers", "initContainers")


def makes_the_same_pods(one: Revision, other: Revision) -> bool:
    """Whether a pod of one revision could stand for a pod of the other."""
    return one.digest == other.digest or _without_resources(one.template) == _without_resources(other.template)


def _without_resources(template: Manifest) -> Manifest:
    metadata, spec = template["metadata"], dict(template["spec"])
    for part in CONTAINERS:
        if part in spec:
            spec[part] = [{key: value for key, value in one.items() if key != "resources"} for one in spec[part]]
    spec["volumes"] = [_without_size(one) for one in spec.get("volumes") or ()]
    labels = {
        key: value for key, value in metadata.get("labels", {}).items() if key not in (REVISION_LABEL, QUEUE_LABEL)
    }
    return {"metadata": {**metadata, "labels": labels}, "spec": spec}


def _without_size(volume: Manifest) -> Manifest:
    if "emptyDir" not in volume:
        return volume
    return {**volume, "emptyDir": {key: value for key, value in volume["emptyDir"].items() if key != "sizeLimit"}}
