"""A kind node image built once from package registries, for a machine that cannot pull kind's own.

    millstream-base (debootstrap) ── apt: systemd, containerd, iptables, CNI ──> millstream-node-packages:<address>
    kind's Go module: images/base/files (entrypoint, systemd units) ─┐
    Go: kubelet, kubeadm, kubectl                                     ├─ docker build ─> millstream-node:<address>
    Go: control plane, etcd, CoreDNS, pause as FROM-scratch images ───┘

kind's contract for such an image is its entrypoint, systemd as init, /kind/version, /kind/manifests and the images in
containerd's store; taking the files from kind's own module keeps it to the letter. Both images stay in Docker's store.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from hack.cluster import base_image, content, docker_engine, paths, shell
from hack.cluster.errors import ClusterError
from hack.cluster.image_archive import EMPTY_TMP, Files, ScratchImage, Symlink
from hack.cluster.steps import Steps
from hack.cluster.tools import go_toolchain
from hack.cluster.tools.go_tools import (
    CONTROL_PLANE,
    COREDNS,
    ETCD,
    KIND,
    KUBECTL,
    KUBERNETES_VERSION,
    NODE_TOOLS,
    PAUSE,
)

FOLDER = paths.SOURCES / "node"
IPTABLES_NAMES = [f"{family}{suffix}" for family in ("iptables", "ip6tables") for suffix in ("", "-save", "-restore")]
# Not ours to use: kind's snapshotter for rootless Docker, its runtime-spec hook, its test handler.
LAYOUT = "1"  # raise it when the code below lays the context out differently
LEFT_OUT = ("containerd-fuse-overlayfs.service", "clean-install", "mount-product-files.sh")


def packages_name() -> str:
    """The intermediate image: Debian packages only, so it can be built while Go compiles."""
    recipe = (FOLDER / "packages.Dockerfile").read_bytes()
    return f"millstream-node-packages:{content.address_of({'base': base_image.address(), 'recipe': recipe})}"


def name() -> str:
    """`millstream-node:<address>`: changes with any tool's go.sum, any file under hack/cluster/node, the base image."""
    inputs: dict[str, bytes | str] = {f"node/{key}": value for key, value in content.files_under(FOLDER).items()}
    inputs |= {f"tool/{tool.name}": tool.address() for tool in (*NODE_TOOLS, KIND)}
    inputs["base"] = base_image.address()
    inputs["layout"] = LAYOUT
    return f"millstream-node:{content.address_of(inputs)}"


def ensure_packages(steps: Steps) -> str:
    """Have the intermediate image; returns its name."""
    reference = packages_name()
    if not docker_engine.has_image(reference):
        base = base_image.ensure(steps)
        with steps.step("Node image: Debian packages"):
            _docker_build(FOLDER, "packages.Dockerfile", reference, {"BASE": base}, log="node-packages")
    return reference


def ensure(steps: Steps) -> str:
    """Have the node image; returns its name. The Go tools must be built (go_tools.NODE_TOOLS)."""
    reference = name()
    if docker_engine.has_image(reference):
        return reference
    packages = ensure_packages(steps)
    kind_files = _kind_module(steps) / "images" / "base" / "files"
    importer = reference.replace("millstream-node:", "millstream-node-importer:")  # named, so that it can be removed
    workspace = Path(tempfile.mkdtemp(prefix="node-", dir=paths.subfolder("tmp")))
    try:
        with steps.step("Node image: component images"):
            names = _image_names()
            _component_images(names, packages, workspace)
        with steps.step("Node image: assemble"):
            _lay_out(workspace, kind_files, pause=names["pause"])
            _docker_build(
                workspace, "Dockerfile", importer, {"PACKAGES": packages}, "--target=images", log="node-images"
            )
            _docker_build(workspace, "Dockerfile", reference, {"PACKAGES": packages}, log="node-image")
    finally:
        shell.succeeds(["docker", "rmi", importer])
        shutil.rmtree(workspace, ignore_errors=True)
    return reference


def _kind_module(steps: Steps) -> Path:
    """kind's source, from the module cache (the go command checks it against go.sum)."""
    go = go_toolchain.find(steps)
    output = shell.run(
        [go, "mod", "download", "-json", "sigs.k8s.io/kind"], cwd=KIND.folder, env={"GOFLAGS": "", "GOWORK": "off"}
    )
    return Path(json.loads(output)["Dir"])


def _image_names() -> dict[str, str]:
    """The names under which kubeadm will look for its images, by component, as kubeadm itself lists them."""
    listed = shell.run(
        [CONTROL_PLANE.binary("kubeadm"), "config", "images", "list", "--kubernetes-version", KUBERNETES_VERSION]
    )
    return {line.rsplit("/", 1)[1].split(":")[0]: line for line in listed.split()}


def _component_images(names: dict[str, str], packages: str, workspace: Path) -> None:
    folder = workspace / "images"
    folder.mkdir()
    architecture = docker_engine.architecture()
    proxy_files = _kube_proxy_files(packages, workspace / "kube-proxy")
    images: dict[str, Files] = {
        **{command: {f"/usr/local/bin/{command}": CONTROL_PLANE.binary(command)} for command in _STATIC_PODS},
        "kube-proxy": {"/usr/local/bin/kube-proxy": CONTROL_PLANE.binary("kube-proxy"), **proxy_files},
        "etcd": {"/usr/local/bin/etcd": ETCD.binary()},
        "coredns": {"/coredns": COREDNS.binary()},
        "pause": {"/pause": PAUSE.binary()},
    }
    for component, files in images.items():
        entrypoint = [f"/{component}"] if component in ("coredns", "pause") else []
        image = ScratchImage(names[component], {**files, **EMPTY_TMP}, entrypoint, architecture=architecture)
        image.write(folder / f"{component}.tar")


_STATIC_PODS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")


def _kube_proxy_files(packages: str, folder: Path) -> Files:
    """iptables with its extensions and libraries, copied out of the packages image."""
    script = (FOLDER / "collect-kube-proxy-files.sh").read_text()
    folder.mkdir()
    command = ["docker", "run", "--rm", "--interactive", "--network", "none", packages, "sh", "-s"]
    collected = subprocess.run(command, input=script.encode(), capture_output=True, check=False)
    if collected.returncode != 0:
        raise ClusterError(f"Collecting kube-proxy's files failed: {shell.last_words(collected.stderr.decode())}")
    archive = folder.with_suffix(".tar")
    archive.write_bytes(collected.stdout)
    shell.run(["tar", "--extract", "--file", archive, "--directory", folder, "--no-same-owner"])
    files: Files = {f"/{path.relative_to(folder)}": path for path in folder.rglob("*") if path.is_file()}
    return files | {f"/usr/sbin/{command}": Symlink("xtables-nft-multi") for command in IPTABLES_NAMES}


def _lay_out(workspace: Path, kind_files: Path, *, pause: str) -> None:
    """The build context that node/Dockerfile describes."""
    shutil.copy(FOLDER / "Dockerfile", workspace / "Dockerfile")
    binaries = workspace / "bin"
    binaries.mkdir()
    for binary in (CONTROL_PLANE.binary("kubelet"), CONTROL_PLANE.binary("kubeadm"), KUBECTL.binary()):
        shutil.copy(binary, binaries)
    rootfs = workspace / "rootfs"
    for source in (kind_files, FOLDER / "rootfs"):
        for path in sorted(source.rglob("*")):
            if path.is_file() and path.name not in LEFT_OUT:
                target = rootfs / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
                # A module's files lost their modes in the zip: scripts are those in a bin folder.
                target.chmod(0o755 if target.parent.name == "bin" else 0o644)
    config = rootfs / "etc/containerd/config.toml"
    config.write_text(config.read_text().replace("@PAUSE@", pause))
    (rootfs / "kind/version").write_text(KUBERNETES_VERSION + "\n")


def _docker_build(
    context: Path, dockerfile: str, reference: str, arguments: dict[str, str], *more: str, log: str
) -> None:
    words = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
    # The host's network: a build may run where the engine's bridge reaches nothing (behind a VPN, in a sandbox).
    options = ["--network=host", f"--tag={reference}", f"--file={context / dockerfile}", *more, *words]
    shell.run(
        ["docker", "build", *options, context], env={"DOCKER_BUILDKIT": os.environ.get("DOCKER_BUILDKIT", "0")}, log=log
    )
