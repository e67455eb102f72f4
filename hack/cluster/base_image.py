"""`millstream-base`: the root file system that our own images stand on where no image registry can be reached.

Debian bookworm (minbase) with python3.11 and CA certificates, user 65532, made by debootstrap and imported as one
layer of 118 MB. The node image (node_image.py) starts from it too, so that it is made once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from hack.cluster import apt, content, docker_engine, paths, shell
from hack.cluster.errors import ClusterError
from hack.cluster.steps import Steps

SUITE = "bookworm"
PACKAGES = ("ca-certificates", "python3")
USER_ID = 65532
# Documentation, translations and package caches: what no container reads.
PRUNED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "var/cache/apt",
    "var/lib/apt/lists",
    "var/log",
)
# apt would translate and cache again in every layer; pip and friends belong to the images that want them.
APT_SETTINGS = """Acquire::Languages "none";
APT::Install-Recommends "false";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
"""
CHANGES = (
    f"USER {USER_ID}:{USER_ID}",
    "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "ENV LANG=C.UTF-8",
    "WORKDIR /",
    'CMD ["python3"]',
    "LABEL org.opencontainers.image.title=millstream-base",
)


def address() -> str:
    """The tag: the hash of everything above. A Debian point release does not change it; a changed recipe does."""
    recipe = "\n".join([SUITE, *PACKAGES, *PRUNED, APT_SETTINGS, *CHANGES])
    return content.address_of({"recipe": recipe, "format": "1"})


def name() -> str:
    """`millstream-base:<tag>`, as it is called in Docker's own store."""
    return f"millstream-base:{address()}"


def ensure(steps: Steps) -> str:
    """Have the image in Docker's store; returns its name. Needs root where it has to be built."""
    reference = name()
    if docker_engine.has_image(reference):
        return reference
    if os.geteuid() != 0:
        raise ClusterError(f"Building the image {reference} needs root (debootstrap): run this once with sudo.")
    if not shutil.which("debootstrap"):
        with steps.step("Base image: install debootstrap"):
            apt.install(["debootstrap", "debian-archive-keyring"])
    workspace = Path(tempfile.mkdtemp(prefix="rootfs-", dir=paths.subfolder("tmp")))
    try:
        with steps.step(f"Base image: debootstrap {SUITE}"):
            _bootstrap(workspace)
        with steps.step("Base image: import"):
            _import(workspace, reference)
    finally:
        remove_tree(workspace)
    return reference


def _bootstrap(root: Path) -> None:
    options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
    shell.run(["debootstrap", *options, SUITE, root, *_mirror()], log="debootstrap")
    for folder in PRUNED:
        for entry in (root / folder).glob("*"):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    (root / "etc/apt/apt.conf.d/90millstream").write_text(APT_SETTINGS)
    for file, line in (
        ("etc/passwd", f"nonroot:x:{USER_ID}:{USER_ID}:nonroot:/home/nonroot:/usr/sbin/nologin\n"),
        ("etc/group", f"nonroot:x:{USER_ID}:\n"),
    ):
        with (root / file).open("a") as sink:
            sink.write(line)
    home = root / "home/nonroot"
    home.mkdir(mode=0o755)
    os.chown(home, USER_ID, USER_ID)


def _mirror() -> list[str]:
    """The mirror that this machine's own apt uses for the suite, if it is a Debian; else debootstrap's default."""
    try:
        lines = shell.run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Created-By: Packages"])
    except ClusterError:
        return []
    uris = [line.split()[0] for line in lines.splitlines() if line.endswith(f" {SUITE}")]
    return [uri for uri in uris if "/debian" in uri and uri.startswith("http:")][:1]


def _import(root: Path, reference: str) -> None:
    tar = ["tar", "--create", "--sort=name", "--numeric-owner", "--directory", str(root), "."]
    changes = [word for change in CHANGES for word in ("--change", change)]
    with subprocess.Popen(tar, stdout=subprocess.PIPE) as packer:
        result = subprocess.run(
            ["docker", "import", *changes, "-", reference],
            stdin=packer.stdout,
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode != 0 or packer.returncode != 0:
        raise ClusterError(f"`docker import` of the base image failed: {shell.last_words(result.stderr)}")


def remove_tree(folder: Path) -> None:
    """Delete a root file system, first unmounting what an interrupted debootstrap may have left mounted inside."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(f"{folder}/")), reverse=True):
        shell.run(["umount", "--lazy", mount])
    shutil.rmtree(folder, ignore_errors=True)
