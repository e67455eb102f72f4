"""Delete what an interrupted run left in the cluster, so that the next one begins as the first did.

A test's namespace, and each object that a test makes outside it, has a label (`guard.py` refuses one without it). A
release that helm was interrupted at is `release.py`'s, and what a test changed of the CRD is put back here.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from e2e.cluster import Cluster, Object
from e2e.shared_things import LEFTOVER_LABEL, LEFTOVER_VALUE

CRD = "llmdeployments.millstream.dev"
CRD_FILE = Path(__file__).resolve().parent.parent / "crds" / "millstream.dev_llmdeployments.yaml"
RULES_PATH = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/x-kubernetes-validations"
SELECTOR = f"{LEFTOVER_LABEL}={LEFTOVER_VALUE}"
# They are gone when the command returns. Namespaces and volumes wait for pods to end, and nothing waits for them.
QUICKLY_GONE = (
    *("nodes", "customresourcedefinitions", "clusterrolebindings", "clusterroles"),
    *("validatingadmissionpolicybindings", "validatingadmissionpolicies"),
    *("mutatingwebhookconfigurations", "validatingwebhookconfigurations"),
)
SLOWLY_GONE = ("namespaces", "persistentvolumes")
IN_DEFAULT = "pods,services,configmaps,secrets"


def delete_leftovers(cluster: Cluster) -> None:
    """Delete all that has the label of a test. Namespaces of `--keep-namespaces` have another value and stay."""
    every = ("-l", SELECTOR, "--ignore-not-found")
    cluster.kubectl("delete", ",".join(QUICKLY_GONE), *every, "--timeout=60s")
    cluster.kubectl("delete", IN_DEFAULT, "-n", "default", *every, "--wait=false")
    cluster.kubectl("delete", ",".join(SLOWLY_GONE), *every, "--wait=false")


def restore_crd(cluster: Cluster) -> None:
    """Put back the rules of the CRD that a test took away: helm compares charts, not what the cluster has."""
    live = cluster.get("crd", CRD)
    if rules(live) != (wanted := rules(yaml.safe_load(CRD_FILE.read_text(encoding="utf-8")))):
        set_rules(cluster, wanted)


def rules(crd: Object) -> list[Object]:
    """The rules that hold for a whole spec."""
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    found: list[Object] = spec["x-kubernetes-validations"]
    return found


def set_rules(cluster: Cluster, wanted: list[Object]) -> None:
    """Replace the rules that hold for a whole spec."""
    change = json.dumps([{"op": "replace", "path": RULES_PATH, "value": wanted}])
    cluster.kubectl("patch", "crd", CRD, "--type=json", "-p", change)
