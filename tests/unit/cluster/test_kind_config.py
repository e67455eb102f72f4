"""The configuration of kind, per kind of machine."""

from __future__ import annotations

from typing import Any

import yaml

from hack.cluster.kind_config import Machine, render


def parse(machine: Machine) -> tuple[dict[str, Any], str]:
    document = yaml.safe_load(render(machine))
    return document, document["containerdConfigPatches"][0]


def test_an_ordinary_machine_gets_one_node_and_the_registry_only() -> None:
    document, containerd = parse(Machine(cgroup_version=2, lowers_oom_score=True))
    assert document["name"] == "millstream"
    assert document["nodes"] == [{"role": "control-plane"}]
    assert "kubeadmConfigPatches" not in document
    assert 'config_path = "/etc/containerd/certs.d"' in containerd
    assert "SystemdCgroup" not in containerd
    assert "restrict_oom_score_adj" not in containerd


def test_cgroup_v1_moves_kubelet_and_containerd_to_the_same_driver() -> None:
    document, containerd = parse(Machine(cgroup_version=1, lowers_oom_score=True))
    kubelet = yaml.safe_load(document["kubeadmConfigPatches"][0])
    assert kubelet["kind"] == "KubeletConfiguration"
    assert kubelet["cgroupDriver"] == "cgroupfs"
    assert kubelet["failCgroupV1"] is False
    assert "SystemdCgroup = false" in containerd


def test_a_machine_that_may_not_lower_oom_scores_says_so_to_containerd() -> None:
    _, containerd = parse(Machine(cgroup_version=2, lowers_oom_score=False))
    assert "restrict_oom_score_adj = true" in containerd
