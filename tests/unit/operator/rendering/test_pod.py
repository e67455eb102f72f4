"""The pod: restricted, patient while it loads, allowed to drain, and configured as the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.commands.serve import parse_command_line
from millstream_operator.api.llmdeployment import LLMDeployment
from millstream_operator.api.load import parse
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_operator.rendering.names import DEPLOYMENT_LABEL, ROLE_LABEL
from millstream_operator.rendering.objects import objects
from millstream_operator.rendering.pod_defaults import PodDefaults
from millstream_operator.rendering.pod_template import pod_template
from millstream_operator.rendering.revision import render_revision
from millstream_operator.rendering.runtime_config import boot_config, live_config
from millstream_runtime.config import Device, LogLevel
from millstream_runtime.config_files import parse_live, read_boot
from tests.support.llmdeployments import deployment, full_manifest

IMAGE = "registry.example.com/runtime:1"


def template(owner: LLMDeployment, defaults: PodDefaults | None = None) -> dict[str, Any]:
    return pod_template(owner, plan_from_spec(owner, PlanDefaults(IMAGE)), defaults or PodDefaults())


def spec(owner: LLMDeployment, defaults: PodDefaults | None = None) -> dict[str, Any]:
    found: dict[str, Any] = template(owner, defaults)["spec"]
    return found


def container(owner: LLMDeployment) -> dict[str, Any]:
    (only,) = spec(owner)["containers"]
    assert isinstance(only, dict)
    return only


HUB = {"huggingFace": {"repository": "org/name", "tokenSecretRef": {"name": "hub", "key": "reader"}}}
CLAIM = {"persistentVolumeClaim": {"claimName": "models", "path": "chat/v1"}}
OWNERS = {
    "smallest": deployment(),
    "fullest": parse(full_manifest()),
    "from a hub": deployment(model={"source": HUB}),
    "from a volume": deployment(model={"source": CLAIM}),
}


@pytest.mark.parametrize("name", OWNERS)
def test_the_pod_meets_the_restricted_profile(name: str) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted, point by point."""
    pod = spec(OWNERS[name])
    assert not {"hostNetwork", "hostPID", "hostIPC", "ephemeralContainers"} & pod.keys()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    assert all(volume.keys() <= {"name", *allowed} for volume in pod["volumes"])
    for one in [*pod["containers"], *pod.get("initContainers", [])]:
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not one["securityContext"].get("privileged")
        assert all("hostPort" not in port for port in one.get("ports", []))


def test_a_replica_over_several_gpus_has_its_size_and_shared_memory_for_its_ranks() -> None:
    """NCCL's ranks talk through /dev/shm where GPUs cannot reach each other; 64 MiB, the default, are too few."""
    owner = deployment(accelerator={"type": "GPU"}, parallelism={"tensor": 4})
    pod = spec(owner)
    (one,) = pod["containers"]
    assert boot_config(plan_from_spec(owner, PlanDefaults(IMAGE))).tensor_parallel_size == 4
    assert one["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}} in pod["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in one["volumeMounts"]  # noqa: S108
    assert "shm" not in str(spec(deployment(accelerator={"type": "GPU"})))


def test_the_pod_can_write_to_tmp_alone_and_holds_no_token() -> None:
    pod = spec(deployment())
    (one,) = pod["containers"]
    assert one["securityContext"]["readOnlyRootFilesystem"] is True
    writable = [mount["mountPath"] for mount in one["volumeMounts"] if not mount.get("readOnly")]
    assert writable == ["/tmp"]  # noqa: S108
    assert {"name": "HOME", "value": "/tmp"} in one["env"]  # noqa: S108
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False  # thousands of Services would become environment variables
    assert pod["serviceAccountName"] == "demo"


def test_grace_covers_the_longest_drain() -> None:
    """Killed earlier, a running request would be cut off; `terminationGracePeriodSeconds` counts the drain as well."""
    assert spec(deployment())["terminationGracePeriodSeconds"] == 600 + 30
    assert spec(deployment(rollout={"drainTimeout": "1h30m"}))["terminationGracePeriodSeconds"] == 5400 + 30


def test_probes_ask_what_they_are_for() -> None:
    probes = container(deployment(warmup={"timeout": "2m5s"}))
    startup, readiness, liveness = (probes[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
    assert startup["httpGet"]["path"] == readiness["httpGet"]["path"] == "/ready"
    assert liveness["httpGet"]["path"] == "/health"
    assert startup["periodSeconds"] * startup["failureThreshold"] == 125, "the budget is the warm-up's timeout"
    assert readiness["periodSeconds"] * readiness["failureThreshold"] <= 5, "a pod that fails gets no traffic soon"
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60, "a busy engine is not killed"


def mounted_files(owner: LLMDeployment, folder: Path) -> None:
    """What the kubelet would make of the configuration's volume."""
    rendered = objects(owner, render_revision(owner, plan_from_spec(owner, PlanDefaults(IMAGE)), PodDefaults()))
    maps = {one["metadata"]["name"]: one for one in rendered if one["kind"] == "ConfigMap"}
    volume = next(volume for volume in spec(owner)["volumes"] if volume["name"] == "config")
    for source in volume["projected"]["sources"]:
        for item in source["configMap"]["items"]:
            file = folder / item["path"]
            file.parent.mkdir(exist_ok=True)
            file.write_text(maps[source["configMap"]["name"]]["data"][item["key"]])


def test_what_the_operator_writes_the_runtime_reads(tmp_path: Path) -> None:
    """One contract, no second parser: the files lie where the flags look for them, and say what the plan says."""
    owner = parse(full_manifest())
    one = container(owner)
    mount = next(mount for mount in one["volumeMounts"] if mount["name"] == "config")
    assert mount["readOnly"] is True
    mounted_files(owner, tmp_path)
    verb, *flags = one["args"]
    assert verb == "serve"
    given = parse_command_line([flag.replace(mount["mountPath"], str(tmp_path)) for flag in flags])
    read = read_boot(given.config)
    assert read == boot_config(plan_from_spec(owner, PlanDefaults(IMAGE)))
    assert (read.model, read.served_model_name, read.device) == ("/models/demo-chat", "chat", Device.CUDA)
    assert (read.max_model_len, read.max_num_batched_tokens, read.max_num_seqs) == (4096, 1024, 16)
    assert read.drain_timeout_seconds == 300
    assert (read.host, read.port) == ("0.0.0.0", one["ports"][0]["containerPort"])  # noqa: S104
    live = parse_live(given.live_config.read_text(), given.live_config)
    assert live == live_config(owner.spec)
    assert (live.heartbeat_interval_seconds, live.log_level) == (45, LogLevel.DEBUG)


def test_a_pod_starts_without_its_live_configuration_but_not_without_its_boot_configuration() -> None:
    """Somebody may have deleted the one; the other is what the pod is."""
    volume = next(volume for volume in spec(deployment())["volumes"] if volume["name"] == "config")
    optional = [source["configMap"].get("optional", False) for source in volume["projected"]["sources"]]
    assert optional == [False, True]


def test_an_absolute_model_path_stays_and_a_relative_one_lies_below_the_root() -> None:
    def model(path: str) -> str:
        owner = deployment(model={"source": {"local": {"path": path}}})
        return boot_config(plan_from_spec(owner, PlanDefaults(IMAGE))).model

    assert model("/opt/models/x/") == "/opt/models/x"
    assert model("family/x") == "/models/family/x"


def test_no_secret_reaches_args_or_plain_environment() -> None:
    one = container(parse(full_manifest()))
    secret = next(variable for variable in one["env"] if variable["name"] == "SECRET")
    assert secret == {
        "name": "SECRET",
        "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "hub", "optional": True}},
    }


def test_a_gpu_pod_asks_for_one_gpu_and_tolerates_its_taint() -> None:
    gpu = deployment(accelerator={"type": "GPU"})
    assert container(gpu)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert taint in spec(gpu)["tolerations"]
    assert "tolerations" not in spec(deployment())
    assert "nvidia.com/gpu" not in str(container(deployment())["resources"])


def test_a_resource_that_is_named_replaces_the_planners_own() -> None:
    def resources(**given: Any) -> Any:
        overlay = {"spec": {"containers": [{"name": "runtime", "resources": given}]}}
        return container(deployment(podTemplate=overlay))["resources"]

    planned = container(deployment())["resources"]
    alone = resources(limits={"memory": "8192Mi"})
    assert "memory" not in alone["requests"], "Kubernetes takes the limit as the request"
    assert alone["limits"] == {**planned["limits"], "memory": "8Gi"}
    raised = resources(requests={"memory": "6Gi", "cpu": "1"})
    assert raised["requests"] == {**planned["requests"], "memory": "6Gi", "cpu": "1"}
    assert raised["limits"] == {**planned["limits"], "memory": "6Gi"}, "a request above the planned limit raises it"
    assert resources(requests={"cpu": 2})["requests"]["cpu"] == "2"
    assert resources(requests={"cpu": "0.5"})["requests"]["cpu"] == "500m"


def test_a_specs_own_values_win_over_the_charts_defaults_and_the_operators_over_both() -> None:
    defaults = PodDefaults.model_validate(
        {
            "labels": {"team": "nobody", "cost": "7", "app.kubernetes.io/name": "evil"},
            "annotations": {"a": "default"},
            "node_selector": {"disk": "hdd", "zone": "a"},
            "tolerations": [{"key": "default", "operator": "Exists"}],
            "priority_class_name": "default",
        },
        by_name=True,
        strict=False,
    )
    owner = parse(full_manifest())
    labels = template(owner, defaults)["metadata"]["labels"]
    assert (labels["team"], labels["cost"]) == ("search", "7")
    assert labels["app.kubernetes.io/name"] == "millstream-runtime"
    pod = spec(owner, defaults)
    assert pod["nodeSelector"] == {"disk": "ssd", "zone": "a"}
    assert [toleration["key"] for toleration in pod["tolerations"]] == ["default", "spot", "nvidia.com/gpu"]
    assert pod["priorityClassName"] == "high"
    assert spec(deployment(), defaults)["priorityClassName"] == "default"


def test_no_user_can_take_a_pod_out_of_the_services_selector() -> None:
    labels = template(parse(full_manifest()))["metadata"]["labels"]
    assert (labels[DEPLOYMENT_LABEL], labels[ROLE_LABEL]) == ("demo", "leader")


def test_replicas_are_spread_over_nodes_but_never_wait_for_one() -> None:
    (spread,) = spec(deployment())["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
    assert spread["matchLabelKeys"] == ["pod-template-hash"], "old pods of a rollout do not count"


def test_nothing_empty_is_rendered() -> None:
    """The server drops empty fields, and a comparison would see them missing for ever."""

    def empties(value: Any, path: str = "") -> list[str]:
        if isinstance(value, dict):
            return [found for key, child in value.items() for found in empties(child, f"{path}.{key}")]
        if isinstance(value, list) and value:
            return [found for index, child in enumerate(value) for found in empties(child, f"{path}[{index}]")]
        return [path] if value in (None, "", [], {}) and not path.endswith("emptyDir") else []

    for owner in OWNERS.values():
        assert empties(template(owner)) == []


def test_metrics_are_announced_where_the_runtime_serves_them() -> None:
    annotations = template(deployment())["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] == "/metrics"
    assert annotations["prometheus.io/port"] == str(container(deployment())["ports"][0]["containerPort"])
