"""The configuration of kind: one node, the local registry, and three patches that only some machines need. Pure."""

from __future__ import annotations

from dataclasses import dataclass

CLUSTER = "millstream"
CONTEXT = f"kind-{CLUSTER}"
NODE = f"{CLUSTER}-control-plane"
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


def _block(lines: tuple[str, ...]) -> list[str]:
    """A YAML list item holding a literal block."""
    return ["- |-", *(f"  {line}" for line in lines)]
