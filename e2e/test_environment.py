"""Variables of podTemplate: refused in the default image where one may load code, and without effect on its Python."""

from __future__ import annotations

import copy
import json

import pytest

from e2e.cluster import Cluster, Object, eventually
from e2e.deployments import Served, condition, llmd, pods, read, uid_and_restarts, wait_ready
from e2e.release import Release
from e2e.shared_things import SharedThing
from e2e.stored_objects import dry_run, is_applied, without_new_rules
from e2e.test_sources import with_env

REFUSED = "of podTemplate.spec.containers[].env is not accepted in the default image"
ATTACKS = ("OPENSSL_CONF", "LD_LIBRARY_PATH", "CUDA_INJECTION64_PATH", "NCCL_NET_PLUGIN", "PYTHONPYCACHEPREFIX")
# Every process of Python in the pod, by its arguments; and what its environment holds.
PROCESSES = """
import json, pathlib
found = []
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        words = (folder / "cmdline").read_bytes().decode().split("\\0")
        environment = (folder / "environ").read_bytes().decode().split("\\0")
    except OSError:
        continue
    if any(word.startswith("millstream") for word in words):
        found.append({"words": words, "environment": environment})
print(json.dumps(found))
"""


@pytest.mark.parametrize("name", ATTACKS)
def test_a_variable_that_loads_code_is_refused_by_its_name(
    cluster: Cluster, release: Release, namespace: str, name: str
) -> None:
    deployment = with_env(llmd("attack"), TZ="UTC", **{name: "/models/tokenizer.model"})
    said = cluster.refused("apply", "-n", namespace, "-f", "-", stdin=json.dumps(deployment))
    assert f"{name} {REFUSED}" in said
    assert not cluster.items("llmd", "-n", namespace)


def test_a_setting_of_vllm_is_refused_with_the_name_of_our_field(
    cluster: Cluster, release: Release, namespace: str
) -> None:
    deployment = with_env(llmd("from-vllm"), VLLM_API_KEY="x")
    said = cluster.refused("apply", "-n", namespace, "-f", "-", stdin=json.dumps(deployment))
    assert "VLLM_API_KEY give auth.apiKeysSecretRef" in said


def test_an_image_of_ones_own_takes_any_until_it_is_left(cluster: Cluster, release: Release, namespace: str) -> None:
    own = with_env(llmd("own", runtime={"image": release.runtime_image}, replicas=0), LD_PRELOAD="", OPENSSL_CONF="")
    cluster.apply(namespace, own)
    _patch(cluster, namespace, "own", {"service": {"port": 8080}})
    arguments = ("patch", "llmd", "own", "-n", namespace, "--type=merge", "-p", json.dumps({"spec": {"runtime": None}}))
    assert f"OPENSSL_CONF {REFUSED}" in cluster.refused(*arguments), "the last of those that are refused"


@pytest.mark.shared(SharedThing.CRDS)
def test_an_object_of_before_the_rule_serves_on_and_is_edited(
    cluster: Cluster, release: Release, warm_image: None, namespace: str
) -> None:
    stored = with_env(llmd("older"), LD_LIBRARY_PATH="/usr/local/nvidia/lib64", VLLM_X="1")
    with without_new_rules(cluster):
        eventually(lambda: is_applied(cluster, namespace, stored), bool, what="stored without the rule")
    newer = copy.deepcopy(stored) | {"metadata": {"name": "newer"}}
    eventually(
        lambda: dry_run(cluster, namespace, newer).stderr,
        lambda said: f"LD_LIBRARY_PATH {REFUSED}" in said,
        what="refused by the rule",
    )
    wait_ready(cluster, namespace, "older")
    before = {uid_and_restarts(pod) for pod in pods(cluster, namespace, "older")}
    _patch(cluster, namespace, "older", {"runtime": {"logLevel": "Warning"}})
    wait_ready(cluster, namespace, "older")
    assert {uid_and_restarts(pod) for pod in pods(cluster, namespace, "older")} == before, "nothing restarted"
    more = with_env(llmd("older"), LD_LIBRARY_PATH="/usr/local/nvidia/lib64", VLLM_X="1", LD_AUDIT="/models/a")
    change = json.dumps({"spec": {"podTemplate": more["spec"]["podTemplate"]}})
    said = cluster.refused("patch", "llmd", "older", "-n", namespace, "--type=merge", "-p", change)
    assert f"LD_AUDIT {REFUSED}" in said
    assert condition(read(cluster, namespace, "older"), "Ready")["status"] == "True"


def test_every_process_of_a_pod_is_isolated_and_reads_no_settings_of_openssl(
    cluster: Cluster, release: Release, served: Served
) -> None:
    (pod,) = pods(cluster, served.namespace, served.name)
    command = ("exec", pod["metadata"]["name"], "-n", served.namespace, "-c", "runtime", "--", "python3", "-I", "-c")
    processes: list[Object] = json.loads(cluster.kubectl(*command, PROCESSES))
    modules = [process["words"][process["words"].index("-m") + 1] for process in processes]
    assert {"millstream", "millstream_runtime.engine_process"} <= {*modules}
    for process in processes:
        assert "-I" in process["words"][: process["words"].index("-m")], process["words"]
        variables = dict(pair.split("=", 1) for pair in process["environment"] if "=" in pair)
        assert variables["OPENSSL_CONF"] == "/dev/null"
        assert variables["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
        assert "PYTHONPATH" not in variables


def _patch(cluster: Cluster, namespace: str, name: str, spec: Object) -> None:
    cluster.kubectl("patch", "llmd", name, "-n", namespace, "--type=merge", "-p", json.dumps({"spec": spec}))
