"""The previous release's operator is packed small, the same each time, and runs with this checkout's dependencies."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from e2e import previous_operator
from e2e.previous_operator import SOURCES, unpack
from hack.images.build import context_of, read_dockerfile
from hack.images.errors import ImageError

ROOT = Path(__file__).resolve().parents[3]


def test_the_archive_is_small_and_names_no_machine() -> None:
    assert SOURCES.stat().st_size < 2**20
    with tarfile.open(SOURCES) as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert {(member.uid, member.gid, member.mtime, member.uname) for member in members} == {(0, 0, 0, "")}
    assert {member.name.split("/")[1] for member in members} == {"millstream_operator", "millstream_runtime"}


def test_it_starts_with_the_present_dependencies_and_knows_its_settings(tmp_path: Path) -> None:
    unpack(tmp_path)
    path = f"{tmp_path / 'operator'}:{tmp_path / 'runtime'}"
    code = "import millstream_operator.app as app, sys; print(app.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_its_image_differs_in_our_own_code_alone(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    unpack(tmp_path / "old")
    hashes = []
    for checkout in (ROOT, tmp_path / "old"):
        dockerfile = read_dockerfile("operator", checkout, "registry/base:1")
        hashes.append({name: tree.input_hash for name, tree in context_of("operator", dockerfile, checkout).items()})
    assert hashes[0].keys() == hashes[1].keys()
    assert {name for name in hashes[0] if hashes[0][name] != hashes[1][name]} == {"app"}


def test_an_archive_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previous_operator, "SOURCES", tmp_path / "gone.tar.gz")
    with pytest.raises(ImageError, match=r"gone.tar.gz cannot be unpacked"):
        unpack(tmp_path)
