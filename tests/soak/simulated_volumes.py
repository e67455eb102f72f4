"""Volumes for claims: what a cluster's provisioner does, so that a model's cache can be bound.

Nothing is stored. Each claim that waits gets a PersistentVolume of its own, and the volume controller binds the two.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import aiohttp

from tests.soak.api import Api, Object, Refused

CLAIMS = "/api/v1/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
LOOK_SECONDS = 0.3


def volume_for(claim: Object) -> Object:
    """A volume that no other claim can take."""
    metadata, spec = claim["metadata"], claim["spec"]
    reference = {key: metadata[key] for key in ("namespace", "name", "uid")}
    return {
        "metadata": {"name": f"soak-{metadata['uid']}"},
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "storageClassName": spec.get("storageClassName") or "",
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": "/nowhere"},
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **reference},
        },
    }


async def provision(admin: Api) -> None:
    """Give every claim its volume, until cancelled."""
    while True:
        with suppress(aiohttp.ClientError, TimeoutError, Refused):  # the API server may be away
            for claim in await admin.items(CLAIMS):
                if not claim["spec"].get("volumeName") and "deletionTimestamp" not in claim["metadata"]:
                    with suppress(Refused):  # there already: the volume controller has not looked yet
                        await admin.create(VOLUMES, volume_for(claim))
        await asyncio.sleep(LOOK_SECONDS)
