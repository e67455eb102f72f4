"""Rollouts and the configuration of pods: kept while pods serve, updated while they run, and that of older versions."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from millstream_operator.kube.kinds import CONFIG_MAP, CONTROLLER_REVISION, DEPLOYMENT, POD
from tests.support.fake_cluster import FakeCluster
from tests.support.rollout_world import World, image, served

Manifest = dict[str, Any]


# Configuration of what runs


async def test_the_configuration_of_pods_that_serve_is_kept_and_repaired_while_newer_ones_come_and_go() -> None:
    one = await served("Availability")
    (serving,) = [config for config in one.cluster.all(CONFIG_MAP) if config.get("immutable")]
    for sequences in range(1, 9):
        await one.apply(engine={"maxNumSeqs": sequences}, **image("bad"))
    name = serving["metadata"]["name"]
    assert one.cluster.get(CONFIG_MAP, name) is not None
    one.cluster.remove(CONFIG_MAP, name)
    await one.settle()
    assert one.cluster.the(CONFIG_MAP, name)["data"] == serving["data"]
    await one.apply(engine=None, **image("good"))
    assert one.operator.condition("Ready")["status"] == "True", "its record is kept as well"
    boots = [config for config in one.cluster.all(CONFIG_MAP) if config.get("immutable")]
    assert len(boots) <= 4


async def test_a_heartbeat_or_a_log_level_reaches_the_file_and_no_pod() -> None:
    one = await served()
    before, template = one.restarts(), one.cluster.the(DEPLOYMENT)
    await one.apply(warmup={"heartbeatInterval": "5s"}, runtime={"image": "good", "logLevel": "Debug"})
    live = json.loads(one.cluster.the(CONFIG_MAP, "demo-live")["data"]["live.json"])
    assert live == {"heartbeat_interval_seconds": 5, "log_level": "debug"}
    assert (one.restarts(), one.cluster.the(DEPLOYMENT)) == (before, template)
    assert one.operator.condition("Ready")["observedGeneration"] == 2
    assert [kind for _, kind in one.operator.writes] == ["ConfigMap", "LLMDeployment/status"]


# Records of before the configuration was parted


def of_format_1(cluster: FakeCluster) -> FakeCluster:
    """The world as the version before would have left it: flags in the pod, no ConfigMaps, no marks."""
    (record,) = cluster.all(CONTROLLER_REVISION)
    older_digest = "0000000001"
    flags = ["serve", "--model=/models/demo-chat", "--served-model-name=demo", "--heartbeat-interval-seconds=45"]

    def without_files(template: Manifest) -> None:
        template["metadata"]["labels"]["millstream.dev/revision"] = older_digest
        spec = template["spec"]
        spec["containers"][0]["args"] = flags
        spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "config"]
        mounts = spec["containers"][0]["volumeMounts"]
        spec["containers"][0]["volumeMounts"] = [mount for mount in mounts if mount["name"] != "config"]

    older = copy.deepcopy(record)
    cluster.remove(CONTROLLER_REVISION, record["metadata"]["name"])
    older["metadata"]["name"] = "demo-0000000002"
    older["metadata"]["labels"]["millstream.dev/revision"] = older_digest
    older["metadata"]["annotations"] = {}
    older["data"] = {**older["data"], "format": 1}
    del older["data"]["boot"]
    without_files(older["data"]["template"])
    cluster.put(older)
    cluster.edit(DEPLOYMENT, "demo", lambda live: without_files(live["spec"]["template"]))
    for pod in cluster.all(POD):
        cluster.edit(POD, pod["metadata"]["name"], without_files)
    for config in cluster.all(CONFIG_MAP):
        cluster.remove(CONFIG_MAP, config["metadata"]["name"])
    return cluster


async def test_an_upgrade_restarts_no_pod_of_an_older_record() -> None:
    one = await served(warmup={"timeout": "10m"})
    of_format_1(one.cluster)
    template = one.cluster.the(DEPLOYMENT)["spec"]["template"]
    upgraded = World(one.cluster)
    await upgraded.settle()
    assert one.cluster.the(DEPLOYMENT)["spec"]["template"] == template
    assert upgraded.controller.made == []
    assert one.cluster.all(CONFIG_MAP) == []
    upgraded.operator.client.requests.clear()
    await upgraded.settle()
    assert upgraded.operator.client.requests == []


@pytest.mark.parametrize(
    "change", [{"warmup": {"heartbeatInterval": "5s"}}, {"runtime": {"image": "good", "logLevel": "Debug"}}]
)
async def test_what_a_pod_of_an_older_record_cannot_be_told_while_it_runs_replaces_it(change: Manifest) -> None:
    """Not ignored: its flags say it, so another value is another pod, with files this time."""
    one = await served()
    of_format_1(one.cluster)
    await one.apply(**change)
    assert len(one.controller.made) == 1
    assert one.cluster.the(DEPLOYMENT)["spec"]["template"]["spec"]["containers"][0]["args"][1].startswith("--config=")
    assert one.operator.condition("Ready")["status"] == "True"
