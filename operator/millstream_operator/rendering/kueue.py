"""Kueue's queue: the label of an LLMDeployment, copied down to its Deployment and pods. Pure.

    LLMDeployment  kueue.x-k8s.io/queue-name: team-a
      └ Deployment   the same label: Kueue's webhook for Deployments reads it
          └ Pod        the same label: Kueue gates each pod until its queue has quota (scheduling gate .../admission)

It is pinned with the pods. Kueue refuses another queue while a pod of the Deployment is ready, so a change of the label
is taken over when no pod is, for example at zero replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GATE_PREFIX = "kueue.x-k8s.io/"


def queue_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the queue's label, if it is among `labels`."""
    return {QUEUE_LABEL: labels[QUEUE_LABEL]} if labels.get(QUEUE_LABEL) else {}


def is_gated_by_kueue(pod: Mapping[str, Any]) -> bool:
    """Whether a pod has a scheduling gate that Kueue removes."""
    gates = (pod.get("spec") or {}).get("schedulingGates") or ()
    return any(str(one.get("name", "")).startswith(GATE_PREFIX) for one in gates)


def queue_of(pod: Mapping[str, Any]) -> str:
    """Return the queue that a pod waits in; empty where it names none."""
    found: str = (pod["metadata"].get("labels") or {}).get(QUEUE_LABEL, "")
    return found
