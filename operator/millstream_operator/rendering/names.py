"""Names, labels and owner references that every child shares.

Selectors use only `millstream.dev/deployment` and `millstream.dev/role`, because a selector can never change; all
other labels are for people and tools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream_operator.api import API_VERSION, KIND
from millstream_operator.api.llmdeployment import LLMDeployment

DEPLOYMENT_LABEL = "millstream.dev/deployment"
ROLE_LABEL = "millstream.dev/role"
REVISION_LABEL = "millstream.dev/revision"
INSPECTION_LABEL = "millstream.dev/inspection"  # on an inspection's Job, pods and record: what was inspected
PREPARATION_LABEL = "millstream.dev/preparation"  # of the Jobs that quantize, judge and tune, and of their records
ATTEMPT_LABEL = "millstream.dev/attempt"
# Roles. Rollout, pruning and the accounts of GPUs look at leaders alone; an object of a role that this version does not
# know is left to whoever made it.
LEADER = "leader"  # the pod of a replica that answers requests; today a replica is one pod
INSPECTOR = "inspector"  # the Job that reads a model's shape, and its pod
PREPARER = "preparer"  # the Jobs that quantize and judge a model before it serves, their pods and their records
TUNER = "tuner"  # the Job that tunes a draft while the model serves, and its pod
MANAGER = "millstream-operator"
RUNTIME_CONTAINER = "runtime"
INSPECT_CONTAINER = "inspect-model"
QUANTIZE_CONTAINER, JUDGE_CONTAINER, TUNE_CONTAINER = "quantize-model", "judge-model", "tune-draft"
FETCH_CONTAINER = "fetch-model"  # an init container, where the model is downloaded
DRAFT_FETCH_CONTAINER = "draft-fetch-model"  # the same for the draft model
HTTP_PORT_NAME = "http"


def common_labels(name: str) -> dict[str, str]:
    """Labels of every child of the LLMDeployment `name`, its pods included."""
    return {
        "app.kubernetes.io/name": "millstream-runtime",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/managed-by": MANAGER,
        DEPLOYMENT_LABEL: name,
    }


def role_of(manifest: Mapping[str, Any]) -> str:
    """Return the role of a child. One without a role label serves: only Jobs and their pods have another role."""
    found: str = (manifest["metadata"].get("labels") or {}).get(ROLE_LABEL, LEADER)
    return found


def selector_labels(name: str) -> dict[str, str]:
    """Return the labels that select the pods that answer requests."""
    return {DEPLOYMENT_LABEL: name, ROLE_LABEL: LEADER}


def selector_string(name: str) -> str:
    """`status.selector`, for autoscalers."""
    return ",".join(f"{key}={value}" for key, value in selector_labels(name).items())


def owner_reference(owner: LLMDeployment) -> dict[str, Any]:
    """Return the owner reference by which Kubernetes deletes a child with its owner. So no finalizer is needed."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": owner.name,
        "uid": owner.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def child(owner: LLMDeployment, api_version: str, kind: str, name: str | None = None) -> dict[str, Any]:
    """Return a child object with all metadata and no content."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name or owner.name,
            "namespace": owner.metadata.namespace,
            "labels": common_labels(owner.name),
            "ownerReferences": [owner_reference(owner)],
        },
    }
