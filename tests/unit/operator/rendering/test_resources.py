"""Every container has what a namespace's ResourceQuota asks for, and GPU pods grow with the model and its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.quantity import amount, canonical
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.pod_resources import RANK_BYTES
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.rendering.inspect_job import Subject, inspect_job
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.pod_disruption_budget import pod_disruption_budget
from millstream_operator.rendering.pod_template import pod_template
from tests.support.llmdeployments import deployment

Manifest = dict[str, Any]
GIB = 1 << 30
HUB = {"source": {"huggingFace": {"repository": "org/name"}}}
IMAGE = {"source": {"image": {"reference": "registry.example.com/model:1"}}}
CLAIM = {"source": {"persistentVolumeClaim": {"claimName": "models"}}}
GPU = {"type": "GPU"}
COMPUTE = ("cpu", "memory", "ephemeral-storage")
OWNERS = {
    "cpu": deployment(),
    "cpu from a hub": deployment(model=HUB),
    "gpu from a hub": deployment(model=HUB, accelerator=GPU),
    "gpu from an image": deployment(model=IMAGE, accelerator=GPU),
    "gpu from a volume": deployment(model=CLAIM, accelerator=GPU),
    "gpu with a cache": deployment(model={**HUB, "cache": {"size": "20Gi"}}, accelerator=GPU),
    "eight ranks": deployment(model=HUB, parallelism={"tensor": 8}, accelerator=GPU),
}


def pod(owner: LLMDeployment, checkpoint_bytes: int | None = 15 * GIB) -> Manifest:
    plan = plan_from_spec(owner, PlanDefaults("runtime:1"), Facts(checkpoint_bytes=checkpoint_bytes))
    found: Manifest = pod_template(owner, plan, PodDefaults())["spec"]
    return found


def pods_of(owner: LLMDeployment) -> Iterator[Manifest]:
    """Its replicas, with and without a known size, and the pod that inspects its model."""
    yield pod(owner)
    yield pod(owner, None)
    yield inspect_job(owner, Subject(owner.spec.model.source), "runtime:1", PodDefaults())["spec"]["template"]["spec"]


def resources(owner: LLMDeployment, checkpoint_bytes: int | None = 15 * GIB) -> Manifest:
    found: Manifest = pod(owner, checkpoint_bytes)["containers"][0]["resources"]
    return found


@pytest.mark.parametrize("name", OWNERS)
def test_a_quota_on_requests_and_limits_admits_every_container(name: str) -> None:
    """The quota plugin refuses a pod of which one container lacks a resource that the quota counts."""
    for one in pods_of(OWNERS[name]):
        for container in [*one["containers"], *one.get("initContainers", [])]:
            for resource in COMPUTE:
                request, limit = (container["resources"][part][resource] for part in ("requests", "limits"))
                assert 0 < amount(request) <= amount(limit), (container["name"], resource)
                assert (canonical(request), canonical(limit)) == (request, limit), "as the server stores it"


@pytest.mark.parametrize("name", OWNERS)
def test_every_volume_on_the_nodes_disk_or_in_its_memory_is_bounded_and_counted(name: str) -> None:
    for one in pods_of(OWNERS[name]):
        empty = {volume["name"]: volume["emptyDir"] for volume in one["volumes"] if "emptyDir" in volume}
        assert "tmp" in empty
        limits = one["containers"][0]["resources"]["limits"]
        on_disk = [amount(volume["sizeLimit"]) for volume in empty.values() if volume.get("medium") != "Memory"]
        in_memory = [amount(volume["sizeLimit"]) for volume in empty.values() if volume.get("medium") == "Memory"]
        assert sum(on_disk) <= amount(limits["ephemeral-storage"]), "or a pod within its size limits would be evicted"
        assert sum(in_memory) < amount(limits["memory"])


def test_a_gpu_pod_grows_with_its_ranks_and_with_its_checkpoint() -> None:
    one, two, eight = (
        resources(deployment(model=HUB, parallelism={"tensor": tensor}, accelerator=GPU), 40 * GIB)
        for tensor in (1, 2, 8)
    )
    for part in ("requests", "limits"):
        for resource in ("cpu", "memory"):
            sizes = [amount(found[part][resource]) for found in (one, two, eight)]
            assert sizes == sorted(set(sizes)), (part, resource)
    assert amount(eight["requests"]["memory"]) >= 8 * RANK_BYTES + 8 * 512 * (1 << 20), "each rank, and /dev/shm"
    small, large = (resources(deployment(model=HUB, accelerator=GPU), size) for size in (1 * GIB, 40 * GIB))
    for part in ("requests", "limits"):
        for resource in ("memory", "ephemeral-storage"):
            assert amount(small[part][resource]) < amount(large[part][resource])


def test_a_download_is_requested_of_the_disk_once_and_an_images_layers_twice() -> None:
    def disk(model: Manifest) -> int:
        return int(amount(resources(deployment(model=model, accelerator=GPU))["requests"]["ephemeral-storage"]) // GIB)

    assert disk(HUB) == 16, "the weights and a GiB besides"
    assert disk(IMAGE) == 31, "packed and unpacked"
    assert disk(CLAIM) == disk({**HUB, "cache": {"size": "20Gi"}}) == 0


def test_pod_template_changes_the_download_and_the_inspection_by_the_name_of_the_container() -> None:
    given = {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}
    owner = deployment(
        model=HUB,
        podTemplate={"spec": {"initContainers": [{"name": "fetch-model", "resources": given}]}},
        accelerator=GPU,
    )
    (fetch,) = pod(owner)["initContainers"]
    job = inspect_job(owner, Subject(owner.spec.model.source), "runtime:1", PodDefaults())
    (inspect,) = job["spec"]["template"]["spec"]["containers"]
    for container in (fetch, inspect):
        assert container["resources"]["requests"] == {"cpu": "1", "ephemeral-storage": "256Mi"}
        assert container["resources"]["limits"]["memory"] == "1Gi"


def test_a_drain_may_always_evict_a_pod_that_does_not_serve() -> None:
    budget = pod_disruption_budget(deployment(replicas=2))
    assert budget is not None
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
