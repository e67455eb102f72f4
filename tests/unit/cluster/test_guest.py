"""The local cluster is a guest: the user's kubeconfig, ports, proxy and disk stay theirs."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import Cluster, refusal_of
from hack.cluster import kind_cluster, kind_config, paths, registry
from hack.cluster.errors import ClusterError
from hack.cluster.kind_config import Machine, without_proxy
from hack.cluster.machine import disk, supported
from hack.cluster.steps import Steps
from hack.cluster.tools import go_tools

ROOT = Path(__file__).resolve().parents[3]
GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine whose docker, kind and kubectl write down how they were called; the folder of their notes."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool, answer in {"docker": "{}", "kind": "apiVersion: v1", "kubectl": "ok"}.items():
        script = (
            f"#!/bin/sh\necho \"$0 $* NO_PROXY=$NO_PROXY\" >> {tmp_path}/calls\ncat > /dev/null <&0\necho '{answer}'\n"
        )
        (tools / tool).write_text(script)
        (tools / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "mine"))
    monkeypatch.delenv(registry.SETTING, raising=False)
    monkeypatch.setattr(paths, "TOOLS", tmp_path / ".tools")
    monkeypatch.setattr(paths, "KUBECONFIG", tmp_path / ".tools" / "kubeconfig")
    monkeypatch.setattr(go_tools.GoTool, "binary", lambda self, name="": tools / (name or self.name))
    registry.port.cache_clear()
    yield tmp_path
    registry.port.cache_clear()


def test_no_call_of_kind_may_touch_the_users_kubeconfig(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kind writes to $KUBECONFIG and switches its current context, unless it is given a file."""
    monkeypatch.setattr(kind_cluster, "machine", lambda: Machine(cgroup_version=2, lowers_oom_score=True))
    monkeypatch.setattr(kind_cluster, "problems", list)
    monkeypatch.setattr(go_tools.GoTool, "is_built", lambda _: True)
    steps = Steps(out=io.StringIO())
    kind_cluster._create(steps, "node:1")
    kind_cluster.delete(steps)
    steps.close()
    calls = [line for line in (machine / "calls").read_text().splitlines() if "/kind " in line]
    assert any(" create cluster " in line for line in calls)
    assert any(" delete cluster " in line for line in calls)
    for line in calls:
        assert f"--kubeconfig={machine}/.tools/kubeconfig" in line or " get kubeconfig " in line, line
    assert not (machine / "mine").exists()
    assert not (machine / "home").exists()


def test_the_node_asks_no_proxy_for_the_registry_next_door(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind_cluster, "machine", lambda: Machine(cgroup_version=2, lowers_oom_score=True))
    monkeypatch.setattr(kind_cluster, "problems", list)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    steps = Steps(out=io.StringIO())
    kind_cluster._create(steps, "node:1")
    steps.close()
    (create,) = [line for line in (machine / "calls").read_text().splitlines() if " create cluster " in line]
    assert create.endswith("NO_PROXY=10.0.0.0/8,localhost,127.0.0.1,millstream-registry")


def test_without_a_proxy_nothing_is_set() -> None:
    assert without_proxy({"NO_PROXY": "a"}, "b") == {}
    both = without_proxy({"http_proxy": "p", "NO_PROXY": "a, b", "no_proxy": "b,c"}, "d")
    assert both["NO_PROXY"] == both["no_proxy"] == "a,b,c,localhost,127.0.0.1,d"


def test_the_registry_takes_the_next_port_where_5001_is_taken(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        monkeypatch.setattr(registry, "PORTS", range(number, number + 20))
        assert number < registry.port() < number + 20
        assert registry.address() == f"localhost:{registry.port()}"
        monkeypatch.setattr(registry, "PORTS", range(number, number + 1))
        registry.port.cache_clear()
        with pytest.raises(ClusterError, match=r"Every port from .* is taken.*MILLSTREAM_REGISTRY_PORT=6000"):
            registry.port()


def test_the_registry_keeps_the_port_of_its_container(machine: Path) -> None:
    bindings = json.dumps({"5000/tcp": [{"HostIp": "127.0.0.1", "HostPort": "5007"}]})
    (machine / "bin" / "docker").write_text(f"#!/bin/sh\necho '{bindings}'\n")
    assert registry.port() == 5007


@pytest.mark.parametrize(("setting", "port"), [("6000", 6000), (" 1024 ", 1024)])
def test_a_setting_names_the_port(machine: Path, monkeypatch: pytest.MonkeyPatch, setting: str, port: int) -> None:
    monkeypatch.setenv(registry.SETTING, setting)
    assert registry.port() == port


@pytest.mark.parametrize("setting", ["80", "65536", "high", "-1", "５００１"])
def test_a_setting_that_is_no_port_is_named(machine: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv(registry.SETTING, setting)
    with pytest.raises(ClusterError, match=r"MILLSTREAM_REGISTRY_PORT is .*must be a port from 1024 to 65535"):
        registry.port()


def test_two_folders_on_one_disk_need_the_sum(tmp_path: Path) -> None:
    cache, docker = tmp_path / "cache", tmp_path / "docker"
    for folder in (cache, docker):
        folder.mkdir()
    needs = [(cache, 8 * GIB), (docker, 20 * GIB), (tmp_path / "remote", 900 * GIB)]
    disk.refuse_full(needs, free_bytes=lambda _: 28 * GIB)
    with pytest.raises(ClusterError, match=r"has 27 GiB free and a first run needs 28 GiB: make room") as refused:
        disk.refuse_full(needs, free_bytes=lambda _: 28 * GIB - 1)
    assert f"{docker} (20 GiB)" in str(refused.value)


def test_the_real_disk_is_asked(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="GiB free and a first run needs 1073741824 GiB"):
        disk.refuse_full([(tmp_path, 2**60)])


@pytest.mark.parametrize(
    ("system", "processor", "version", "said"),
    [
        ("Linux", "x86_64", (3, 11), ""),
        ("Linux", "x86_64", (3, 14), ""),
        ("Darwin", "arm64", (3, 9), "Linux on x86_64, and this is Darwin on arm64"),
        ("Windows", "AMD64", (3, 12), "this is Windows on AMD64"),
        ("Linux", "riscv64", (3, 11), "this is Linux on riscv64"),
        ("Linux", "x86_64", (3, 9), "Python 3.11 or newer is needed"),
        ("", "", (3, 11), "an unknown system on an unknown processor"),
    ],
)
def test_a_foreign_machine_is_refused_with_what_is_supported(
    system: str, processor: str, version: tuple[int, int], said: str
) -> None:
    problem = supported.problem(system, processor, version)
    assert (said in problem) if said else problem == ""
    assert "\n" not in problem


def test_make_asks_before_it_installs_anything(tmp_path: Path) -> None:
    """On a machine that says it is a Mac: one sentence, no environment, no download."""
    python = tmp_path / "python3"
    code = "import platform, runpy, sys; platform.system = lambda: 'Darwin'; "
    code += "runpy.run_path(sys.argv[1], run_name='__main__')"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
    python.chmod(0o755)
    for target in ("demo", "test", "cluster-up", "e2e"):
        command = ["make", "--no-print-directory", target, f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode != 0, target
        assert "The local cluster and the images are built for Linux on x86_64, and this is Darwin" in done.stderr
        assert not (tmp_path / "venv").exists()


def cluster_with(machine: Path, kubectl: str) -> Cluster:
    (machine / "bin" / "kubectl").write_text(f"#!/bin/sh\n{kubectl}\n")
    (machine / "bin" / "helm").write_text("#!/bin/sh\n")
    (machine / "bin" / "helm").chmod(0o755)
    return Cluster(machine / "kubeconfig", machine / "bin")


def test_the_end_to_end_tests_refuse_a_cluster_that_was_not_made_for_them(machine: Path) -> None:
    namespace, name = kind_config.MARKER
    assert kind_config.marker()["metadata"] == {"name": name, "namespace": namespace}
    refusal = refusal_of(cluster_with(machine, "exit 0"))
    assert "was not made for tests" in refusal
    assert f"kubectl create configmap {name} -n {namespace}" in refusal
    assert refusal_of(cluster_with(machine, f"echo configmap/{name}")) == ""
    assert "cannot be asked: refused" in refusal_of(cluster_with(machine, "echo refused >&2; exit 1"))
