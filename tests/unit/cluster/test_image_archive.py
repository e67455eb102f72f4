"""Images written without a build daemon: what Docker and containerd will find in the archive."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.image_archive import EMPTY_TMP, ScratchImage, Symlink


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    path = tmp_path / "tool"
    path.write_bytes(b"\x7fELF binary")
    path.chmod(0o755)
    return path


def image_of(binary: Path) -> ScratchImage:
    files: dict[str, Path | bytes | Symlink] = {
        "/usr/local/bin/tool": binary,
        "/etc/tool.yml": b"a: 1\n",
        "/usr/local/bin/alias": Symlink("tool"),
        **EMPTY_TMP,
    }
    return ScratchImage("local/tool:1", files, ["/usr/local/bin/tool"])


def read(archive: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    with tarfile.open(archive) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    manifest = json.loads(members["manifest.json"])[0]
    return manifest, json.loads(members[manifest["Config"]]), members[manifest["Layers"][0]]


def test_the_archive_names_its_image_and_its_layer_by_digest(tmp_path: Path, binary: Path) -> None:
    image_of(binary).write(tmp_path / "image.tar")
    manifest, config, layer = read(tmp_path / "image.tar")
    assert manifest["RepoTags"] == ["local/tool:1"]
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(layer).hexdigest()]
    assert config["config"]["Entrypoint"] == ["/usr/local/bin/tool"]


def test_modes_links_and_parents_of_the_layer(tmp_path: Path, binary: Path) -> None:
    image_of(binary).write(tmp_path / "image.tar")
    with tarfile.open(fileobj=io.BytesIO(read(tmp_path / "image.tar")[2])) as layer:
        members = {member.name: member for member in layer}
    assert members["usr/local/bin/tool"].mode == 0o755
    assert members["etc/tool.yml"].mode == 0o644
    assert members["usr/local/bin/alias"].linkname == "tool"
    assert members["usr/local/bin"].isdir()
    assert members["tmp"].mode == 0o1777
    assert {member.uid for member in members.values()} == {0}


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path, binary: Path) -> None:
    image_of(binary).write(tmp_path / "first.tar")
    binary.touch()
    image_of(binary).write(tmp_path / "second.tar")
    assert (tmp_path / "first.tar").read_bytes() == (tmp_path / "second.tar").read_bytes()
