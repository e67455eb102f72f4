"""The operator of the previous release, as an image of today's dependencies: for the test of an upgrade.

    e2e/fixtures/operator-0.1.0.tar.gz   the packages at the last commit of that release (`pack` makes it)
    this checkout                        Dockerfile, lock, uv: the image differs in our own code alone

python -m e2e.previous_operator COMMIT   packs the sources of a commit anew
"""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from hack.images.build import Say, build, read_base
from hack.images.contexts import CONTRACT_FILES
from hack.images.errors import ImageError
from hack.images.registry import Registry

CHECKOUT = Path(__file__).resolve().parent.parent
SOURCES = CHECKOUT / "e2e" / "fixtures" / "operator-0.1.0.tar.gz"
TAKEN_FROM_THIS_CHECKOUT = (
    "hack/images/operator/Dockerfile",
    "hack/images/interpreter/millstream.pth",
    "requirements/operator.txt",
)


def build_previous_operator(present: str, *, say: Say) -> str:
    """Have the image in the registry of `present`, this checkout's operator image; returns its reference.

    Raises:
        ImageError: the registry does not answer, or `present` is not of a registry that we can push to.
    """
    address, _, _ = present.partition("/")
    registry = Registry(address)
    with tempfile.TemporaryDirectory(prefix="previous-release-") as folder:
        checkout = Path(folder)
        unpack(checkout)
        return build(
            "operator", checkout=checkout, registry=registry, base=read_base_name(registry, present), say=say
        ).reference


def read_base_name(registry: Registry, reference: str) -> str:
    """The reference of the base image on which one of our images stands, as its own label says."""
    labels = (read_base(registry, reference).config.get("config") or {}).get("Labels") or {}
    try:
        return str(labels["org.opencontainers.image.base.name"])
    except KeyError:
        raise ImageError(f"The image {reference} does not name its base image: build it by `make images`.") from None


def unpack(checkout: Path) -> None:
    """Write a checkout that holds the release's packages and this checkout's recipe."""
    try:
        with tarfile.open(SOURCES) as archive:
            archive.extractall(checkout, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise ImageError(f"{SOURCES} cannot be unpacked: {error}.") from error
    for name in TAKEN_FROM_THIS_CHECKOUT:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, checkout / name)
    for name in CONTRACT_FILES:  # one that the release had not yet: nothing of it imports the module
        module = checkout / "runtime" / "millstream_runtime" / name
        module.parent.mkdir(parents=True, exist_ok=True)
        module.touch()
    (checkout / ".tools").symlink_to(CHECKOUT / ".tools")


def pack(commit: str) -> bytes:
    """The archive: the operator's package and the modules of the runtime that it imports; the same bytes each time."""
    wanted = ["operator/millstream_operator", *(f"runtime/millstream_runtime/{name}" for name in CONTRACT_FILES)]
    command = ["git", "ls-tree", "-r", "--name-only", commit, *wanted]
    names = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.split()
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(names):
            show = ["git", "show", f"{commit}:{name}"]
            data = subprocess.run(show, cwd=CHECKOUT, capture_output=True, check=True).stdout
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return gzip.compress(plain.getvalue(), compresslevel=9, mtime=0)


if __name__ == "__main__":
    SOURCES.write_bytes(pack(sys.argv[1]))
