"""`millstream-base`: the root file system that our own images stand on where no image registry can be reached.

Debian bookworm (minbase) with its security updates, python3.11 and CA certificates, user 65532, made by debootstrap and
apt and imported as one layer of 120 MB. It is made anew when the security suite changes (security_updates.py); without
a network, or without the rights to make it, the one that is there stays.

The node image (node_image.py) starts from it too, but is not made anew for an update: that would replace a cluster that
is in use.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from hack.cluster import apt, content, docker_engine, paths, security_updates, shell
from hack.cluster.errors import ClusterError
from hack.cluster.steps import Steps

SUITE = "bookworm"
SECURITY_SUITE = f"{SUITE}-security"
REPOSITORY = "millstream-base"
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
    """The hash of everything above. Debian's updates do not change it; a changed recipe does."""
    recipe = "\n".join([SUITE, SECURITY_SUITE, *PACKAGES, *PRUNED, APT_SETTINGS, *CHANGES])
    return content.address_of({"recipe": recipe, "format": "2"})


def name(updates: str) -> str:
    """`millstream-base:<recipe>-<updates>`, as it is called in Docker's own store."""
    return f"{REPOSITORY}:{address()}-{updates[:8] or 'unknown'}"


def newest_made() -> str:
    """The name of the image of this recipe that was made last; empty where there is none."""
    listed = shell.run(["docker", "images", "--format", "{{.Repository}}:{{.Tag}}", REPOSITORY]).split()
    return next((image for image in listed if image.startswith(f"{REPOSITORY}:{address()}-")), "")


def ensure(steps: Steps) -> str:
    """Have the image, with the security updates of now, in Docker's store; returns its name.

    Raises:
        ClusterError: there is none of this recipe yet, and it cannot be made: no root, no network.
    """
    made = newest_made()
    updates = security_updates.newest(_security_uri(), SECURITY_SUITE, docker_engine.architecture(), steps.say)
    reference = name(updates)
    if made and (made == reference or not updates):
        return made
    if made and os.geteuid() != 0:
        steps.say(f"{made} lacks security updates of Debian: run `sudo python3 -m hack.cluster base-image` once")
        return made
    if made and security_updates.failed_lately(reference):
        steps.say(f"{made} lacks security updates of Debian: making it anew failed, and is tried again in 30 minutes")
        return made
    try:
        _make(reference, steps)
    except (ClusterError, OSError) as error:
        if not made:
            raise
        security_updates.remember_failed_build(reference)
        steps.say(f"{error} {made} stays, without the newest security updates.")
        return made
    return reference


def _make(reference: str, steps: Steps) -> None:
    if os.geteuid() != 0:
        raise ClusterError(f"Building the image {reference} needs root (debootstrap): run this once with sudo.")
    if not shutil.which("debootstrap"):
        with steps.step("Base image: install debootstrap"):
            apt.install(["debootstrap", "debian-archive-keyring"])
    workspace = Path(tempfile.mkdtemp(prefix="rootfs-", dir=paths.subfolder("tmp")))
    try:
        with steps.step(f"Base image: debootstrap {SUITE}"):
            _bootstrap(workspace)
        with steps.step("Base image: security updates"):
            _update(workspace)
            _tidy(workspace)
        with steps.step("Base image: import"):
            _import(workspace, reference)
    finally:
        remove_tree(workspace)


def _bootstrap(root: Path) -> None:
    options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
    shell.run(["debootstrap", *options, SUITE, root, *_mirrors(SUITE)[:1]], log="debootstrap")


def _update(root: Path) -> None:
    """Upgrade by the image's own apt, which then knows the security suite, too."""
    sources = root / "etc/apt/sources.list"
    main = next((line.split()[1] for line in sources.read_text().splitlines() if line.startswith("deb ")), "")
    if not main:
        raise ClusterError(f"{sources} names no mirror; debootstrap did not end well.")
    security = (_mirrors(SECURITY_SUITE) or [security_of(main)])[0]
    sources.write_text(f"deb {main} {SUITE} main\ndeb {security} {SECURITY_SUITE} main\n")
    for command in (["update"], ["upgrade", "--yes", "--no-install-recommends"]):
        environment = apt.QUIET | {"LC_ALL": "C.UTF-8"}
        shell.run(["chroot", root, "apt-get", *command], env=environment, log=f"base-{command[0]}")


def security_of(main: str) -> str:
    """Where a mirror of Debian has the security suite: beside the folder of all others."""
    return f"{main.rstrip('/')}-security"


def _tidy(root: Path) -> None:
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


def _security_uri() -> str:
    """Where this machine's apt, or else debootstrap, finds the security suite; empty where neither knows."""
    if found := _mirrors(SECURITY_SUITE):
        return found[0]
    script = Path("/usr/share/debootstrap/scripts") / SUITE
    default = re.search(r"^default_mirror (\S+)", script.read_text(), re.MULTILINE) if script.is_file() else None
    return security_of(default[1]) if default else ""


def _mirrors(suite: str) -> list[str]:
    """The mirrors that this machine's own apt uses for the suite, if it is a Debian of that release."""
    try:
        lines = shell.run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Created-By: Packages"])
    except ClusterError:
        return []
    uris = [line.split()[0] for line in lines.splitlines() if line.endswith(f" {suite}")]
    return [uri for uri in uris if "/debian" in uri and uri.startswith("http:")]


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
