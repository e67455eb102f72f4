"""The configuration of kind: one node, the local registry, and three patches that only some machines need. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CLUSTER = "millstream"
NODE = f"{CLUSTER}-control-plane"
# The end-to-end tests install, break and delete things everywhere in a cluster that carries this ConfigMap.
MARKER = ("kube-public", "millstream-test-cluster")
_CRI = 'plugins."io.containerd.grpc.v1.cri"'


@dataclass(frozen=True)
class Machine:
    """Facts of the host that change the configuration."""

    cgroup_version: int
    lowers_oom_score: bool  # False without CAP_SYS_RESOURCE: the kernel refuses to lower oom_score_adj


def render(machine: Machine) -> str:
    """The YAML for `kind create cluster --config -`."""
    lines = [
        "kind: Cluster",
        "apiVersion: kind.x-k8s.io/v1alpha4",
        f"name: {CLUSTER}",
        "nodes:",
        "- role: control-plane",
        "containerdConfigPatches:",
        *_block(_containerd_patch(machine)),
    ]
    if machine.cgroup_version == 1:
        lines += ["kubeadmConfigPatches:", *_block(_KUBELET_ON_CGROUP_V1)]
    return "\n".join(lines) + "\n"


# The kubelet refuses cgroup v1 by default, and with the systemd driver some starts lose 15 s to a race.
_KUBELET_ON_CGROUP_V1 = (
    "kind: KubeletConfiguration",
    "apiVersion: kubelet.config.k8s.io/v1beta1",
    "cgroupDriver: cgroupfs",
    "failCgroupV1: false",
)


def _containerd_patch(machine: Machine) -> tuple[str, ...]:
    patch = [f"[{_CRI}.registry]", '  config_path = "/etc/containerd/certs.d"']
    if not machine.lowers_oom_score:
        # Else every sandbox dies with "can't get final child's PID from pipe: EOF".
        patch += [f"[{_CRI}]", "  restrict_oom_score_adj = true"]
    if machine.cgroup_version == 1:
        patch += [f"[{_CRI}.containerd.runtimes.runc.options]", "  SystemdCgroup = false"]
    return tuple(patch)


def without_proxy(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """The variables with which `hosts` are reached directly where a proxy is set; none where there is no proxy.

    kind hands the proxy of this machine to the node, whose containerd would ask it for the registry next door.
    """
    proxies = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    if not any(environment.get(name) for name in proxies):
        return {}
    listed = [name for key in ("NO_PROXY", "no_proxy") for name in environment.get(key, "").split(",") if name.strip()]
    value = ",".join(dict.fromkeys([*(name.strip() for name in listed), "localhost", "127.0.0.1", *hosts]))
    return {"NO_PROXY": value, "no_proxy": value}


def marker() -> dict[str, object]:
    """The ConfigMap that lets the end-to-end tests use this cluster."""
    namespace, name = MARKER
    text = "made by `python3 -m hack.cluster up`: its end-to-end tests may change and delete anything in this cluster"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace},
        "data": {"purpose": text},
    }


def _block(lines: tuple[str, ...]) -> list[str]:
    """A YAML list item holding a literal block."""
    return ["- |-", *(f"  {line}" for line in lines)]
