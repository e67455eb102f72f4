"""A volume made by hand: the local cluster has no storage provisioner, so a claim binds to nothing else.

A folder of the node that everyone may write to, made by a pod that may, and a PersistentVolume that waits for one
claim by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from e2e.cluster import Cluster, Object, eventually
from e2e.shared_things import LEFTOVER_LABEL, LEFTOVER_VALUE

STORAGE_CLASS = "e2e-by-hand"  # no such object: nothing provisions, a volume of the same class binds
ROOT = "/var/lib/millstream-e2e"
SCRIPT = "import os, sys; os.makedirs(sys.argv[1], exist_ok=True); os.chmod(sys.argv[1], 0o777)"


@contextmanager
def node_volume(cluster: Cluster, namespace: str, claim: str, image: str) -> Iterator[None]:
    """An empty volume for the claim `claim` of `namespace`, for the length of the block."""
    name = f"{namespace}-{claim}"
    cluster.apply("default", _folder_maker(name, image))
    try:
        eventually(
            lambda: cluster.get("pod", name, "-n", "default"),
            lambda pod: pod.get("status", {}).get("phase") == "Succeeded",
            what="the folder made",
            timeout_seconds=120,
        )
        cluster.apply("default", _volume(name, namespace, claim))
        yield
    finally:
        cluster.kubectl("delete", "pod", name, "-n", "default", "--ignore-not-found", "--wait=false")
        cluster.kubectl("delete", "persistentvolume", name, "--ignore-not-found", "--wait=false")


def _folder_maker(name: str, image: str) -> Object:
    """Root on the node's own disk, which is why it is in no restricted namespace."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {LEFTOVER_LABEL: LEFTOVER_VALUE}},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {"runAsUser": 0, "runAsNonRoot": False},
            "containers": [
                {
                    "name": "make",
                    "image": image,
                    "command": ["python3", "-c", SCRIPT, f"{ROOT}/{name}"],
                    "volumeMounts": [{"name": "root", "mountPath": ROOT}],
                }
            ],
            "volumes": [{"name": "root", "hostPath": {"path": ROOT, "type": "DirectoryOrCreate"}}],
        },
    }


def _volume(name: str, namespace: str, claim: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "labels": {LEFTOVER_LABEL: LEFTOVER_VALUE}},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany", "ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": STORAGE_CLASS,
            "claimRef": {"namespace": namespace, "name": claim},
            "hostPath": {"path": f"{ROOT}/{name}"},
        },
    }
