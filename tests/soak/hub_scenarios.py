"""What a real deployment does beyond the small one on a CPU: a model from a hub, on a GPU, cached and autoscaled.

Its first plan waits for an inspection (a Job, its pod's answer, a ConfigMap); its pods share a cache (a claim); an
autoscaler owns its replicas; and a revision that fails is rolled back. Each writes objects, and so has places to be hit
that the deployment on a CPU has not.
"""

from __future__ import annotations

from tests.soak.api import Object, is_ready, llmd, llmd_path
from tests.soak.experiments import NAME, Scenario
from tests.soak.simulated_pods import FAILS_LABEL
from tests.soak.world import World


def spec_hub() -> Object:
    """The demo model under the name of a hub's; in place, so that a revision that fails is rolled back."""
    return {
        "model": {
            "servedName": "chat",
            "source": {"huggingFace": {"repository": "example/chat", "revision": "main"}},
            "cache": {"size": "20Gi"},
        },
        "accelerator": {"type": "GPU"},
        "engine": {"maxModelLen": 2048},
        "autoscaling": {"minReplicas": 1, "maxReplicas": 3, "provider": "HPA"},
        "rollout": {"strategy": "ResourceAware"},
    }


def spec_other_revision() -> Object:
    """Another revision of the model, which is inspected; other pods; other bounds of the autoscaler."""
    spec = spec_hub()
    spec["model"]["source"]["huggingFace"]["revision"] = "v2"
    return spec | {"engine": {"maxModelLen": 1024}, "autoscaling": {"maxReplicas": 5, "provider": "HPA"}}


def spec_that_fails() -> Object:
    """Its pods end with an error that no other try mends."""
    return spec_hub() | {"podTemplate": {"metadata": {"labels": {FAILS_LABEL: "true"}}}}


async def _create(world: World, namespace: str) -> None:
    await world.admin.create(llmd_path(namespace), llmd(NAME, spec_hub()))


async def _update(world: World, namespace: str) -> None:
    await world.admin.replace_spec(namespace, NAME, spec_other_revision())


async def _fail(world: World, namespace: str) -> None:
    await world.admin.replace_spec(namespace, NAME, spec_that_fails())


async def _replace(world: World, namespace: str) -> None:
    await world.admin.delete(llmd_path(namespace, NAME))
    await world.admin.create(llmd_path(namespace), llmd(NAME, spec_other_revision()))


def serves_again(manifest: Object) -> bool:
    """The failed revision is rolled back, and a pod of the one before answers."""
    status = manifest.get("status") or {}
    rollout = status.get("rollout") or {}
    seen = status.get("observedGeneration") == manifest["metadata"]["generation"]
    available = any(c["type"] == "Available" and c["status"] == "True" for c in status.get("conditions") or ())
    return bool(seen and available and rollout.get("phase") == "RolledBack")


def autoscaled(manifest: Object) -> bool:
    """Ready, and the autoscaler has looked at it: what it says becomes a condition."""
    conditions = (manifest.get("status") or {}).get("conditions") or []
    looked = any(one["type"] == "Autoscaled" and one["status"] != "Unknown" for one in conditions)
    return is_ready(manifest) and looked


_HUB = "GPU, hub model inspected, cache, autoscaler"
HUB_CREATE = Scenario("hub: create", False, _create, start=_create, ended=autoscaled, about=_HUB)
HUB_UPDATE = Scenario("hub: update", True, _update, start=_create, ended=autoscaled, about=_HUB)
HUB_ROLLBACK = Scenario(
    "hub: roll back", True, _fail, start=_create, ended=serves_again, about=f"{_HUB}; its next revision fails"
)
HUB_REPLACE = Scenario("hub: delete and create again", True, _replace, start=_create, ended=autoscaled, about=_HUB)
HUB_SCENARIOS = (HUB_CREATE, HUB_UPDATE, HUB_ROLLBACK, HUB_REPLACE)
