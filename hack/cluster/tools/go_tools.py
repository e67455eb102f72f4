"""The tools that are built from Go modules, each pinned by its own `go.sum`, and where the built ones are.

A folder `hack/cluster/go/<name>/` is a Go module of one purpose: its `go.mod` names the tool's version, its `go.sum`
has the hash of every module that enters (checked by the go command, `-mod=readonly`). Binaries land in
`cache/tools/<name>-<address>/`, so a tool is compiled once per machine; a tool that is there needs no Go at all.

The compiler's version is not part of the address: a Go update should not cost ten minutes of Kubernetes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hack.cluster import content, paths, shell
from hack.cluster.errors import ClusterError
from hack.cluster.steps import Steps
from hack.cluster.tools import go_toolchain

KUBERNETES_VERSION = "v1.34.4"
_VERSIONED = "k8s.io/component-base/version"


@dataclass(frozen=True)
class GoTool:
    """One compile: `binaries` maps the name we want to the main package's import path (`.` is our own main.go)."""

    name: str
    binaries: tuple[tuple[str, str], ...]
    module: str = ""  # folder under hack/cluster/go/; the tool's own name when empty
    variables: tuple[str, ...] = ()  # `-X` link variables: what `--version` prints

    @property
    def folder(self) -> Path:
        """The committed Go module that pins it."""
        return paths.SOURCES / "go" / (self.module or self.name)

    @property
    def link_flags(self) -> str:
        """No symbol table (a third smaller), plus the version variables."""
        return " ".join(["-s", "-w", *(f"-X {variable}" for variable in self.variables)])

    def address(self) -> str:
        """Content address of the module's files, the main packages and the link flags."""
        inputs: dict[str, bytes | str] = dict(content.files_under(self.folder))
        inputs["binaries"] = repr(self.binaries)
        inputs["link flags"] = self.link_flags
        return content.address_of(inputs)

    def home(self) -> Path:
        """The folder in the cache that holds, or will hold, the binaries."""
        return paths.subfolder("tools") / f"{self.name}-{self.address()}"

    def binary(self, name: str = "") -> Path:
        """Path of one binary (the tool's own name by default); it exists once `ensure` has run."""
        return self.home() / (name or self.name)

    def is_built(self) -> bool:
        """Whether every binary is there."""
        return all((self.home() / name).is_file() for name, _ in self.binaries)


def _kubernetes(*commands: str) -> tuple[tuple[str, str], ...]:
    return tuple((command, f"k8s.io/kubernetes/cmd/{command}") for command in commands)


_KUBERNETES_VARIABLES = (
    f"{_VERSIONED}.gitVersion={KUBERNETES_VERSION}",
    f"{_VERSIONED}.gitMajor=1",
    f"{_VERSIONED}.gitMinor=34",
)

REGISTRY = GoTool("registry", (("registry", "."),))
KIND = GoTool("kind", (("kind", "sigs.k8s.io/kind"),))
KUBECTL = GoTool("kubectl", _kubernetes("kubectl"), module="kubernetes", variables=_KUBERNETES_VARIABLES)
_HELM = "helm.sh/helm/v3"
# Without a cluster (`template`, `lint`) helm judges a chart's kubeVersion and deprecated APIs by these.
_HELM_OFFLINE_KUBERNETES = tuple(
    f"{_HELM}/pkg/{package}.k8sVersion{part}"
    for package in ("chartutil", "lint/rules")
    for part in ("Major=1", "Minor=34")
)
HELM = GoTool(
    "helm",
    (("helm", f"{_HELM}/cmd/helm"),),
    variables=(f"{_HELM}/internal/version.version=v3.21.4", *_HELM_OFFLINE_KUBERNETES),
)
KWOK = GoTool(
    "kwok", (("kwok", "sigs.k8s.io/kwok/cmd/kwok"),), variables=("sigs.k8s.io/kwok/pkg/consts.Version=0.7.0",)
)
KSTATUS = GoTool("kstatus", (("kstatus", "."),))  # for tests: what Flux and Helm make of a status
CONTROL_PLANE = GoTool(
    "kubernetes",
    _kubernetes("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubeadm"),
    variables=_KUBERNETES_VARIABLES,
)
# For the soak tests' control plane without a node, on a machine where CONTROL_PLANE was not built (kind's own image).
BARE_CONTROL_PLANE = GoTool(
    "bare-control-plane",
    _kubernetes("kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    module="kubernetes",
    variables=_KUBERNETES_VARIABLES,
)
ETCD = GoTool("etcd", (("etcd", "go.etcd.io/etcd/server/v3"),))
COREDNS = GoTool("coredns", (("coredns", "."),))
PAUSE = GoTool("pause", (("pause", "."),))

NODE_TOOLS = (CONTROL_PLANE, KUBECTL, ETCD, COREDNS, PAUSE)  # what the node image is made of
USER_TOOLS = {tool.name: tool for tool in (KIND, KUBECTL, HELM, KWOK, KSTATUS)}  # what is linked into .tools/bin


def ensure(tools: Iterable[GoTool], steps: Steps) -> None:
    """Build what is missing, one tool after the other (each compile already uses every core)."""
    missing = [tool for tool in tools if not tool.is_built()]
    if not missing:
        return
    go = go_toolchain.find(steps)
    for tool in missing:
        with steps.step(f"Build {tool.name} from its Go module"):
            _build(tool, go)


def link(tool: GoTool) -> Path:
    """Link a built tool of one binary into `.tools/bin/`; returns the link."""
    return paths.link_tool(tool.binary())


def _build(tool: GoTool, go: Path) -> None:
    workspace = Path(tempfile.mkdtemp(prefix=f"{tool.name}-", dir=paths.subfolder("tmp")))
    # GOFLAGS and GOWORK of the user's own projects must not leak in; static binaries run in any root file system.
    env = {"CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}
    try:
        flags = ["-mod=readonly", "-trimpath", "-buildvcs=false", f"-ldflags={tool.link_flags}"]
        packages = [package for _, package in tool.binaries]
        shell.run(
            [go, "build", *flags, "-o", f"{workspace}/", *packages], cwd=tool.folder, env=env, log=f"go-{tool.name}"
        )
        _name_binaries(tool, workspace)
        home = tool.home()
        shutil.rmtree(home, ignore_errors=True)  # a half-made one; a whole one would not have come here
        workspace.chmod(0o755)
        workspace.replace(home)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _name_binaries(tool: GoTool, workspace: Path) -> None:
    """Give the binaries our names: go calls one after its package's last element (`server` for etcd's main)."""
    built = sorted(path.name for path in workspace.iterdir())
    if len(tool.binaries) == 1 and len(built) == 1:
        (workspace / built[0]).rename(workspace / tool.binaries[0][0])
    elif built != sorted(name for name, _ in tool.binaries):
        raise ClusterError(f"Building {tool.name} gave {built} instead of {[name for name, _ in tool.binaries]}.")
