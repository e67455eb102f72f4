"""Compiled kernels are kept where all clones find them, and made anew where nothing can be kept."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.cluster import paths
from hack.kernels import cache
from hack.kernels.store import compile_all
from millstream_kernels.variants import VARIANTS

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's cache and a checkout of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(paths, "TOOLS", tmp_path / ".tools")
    cache.cache_folder.cache_clear()
    yield
    cache.cache_folder.cache_clear()


def test_it_is_a_folder_of_the_users_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache.cache_folder("kernels") == tmp_path / "cache" / "millstream" / "kernels"
    assert capsys.readouterr().err == ""


def test_without_a_cache_it_is_in_the_checkout_and_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert cache.cache_folder("kernels") == tmp_path / ".tools" / "kernels"
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / ".tools" / "kernels") in line


def test_on_a_full_disk_it_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def disk_usage(folder: Path) -> Usage:
        return Usage(1 << 40, 1 << 40, 1 << 20) if Path(folder).is_relative_to(tmp_path) else Usage(1 << 40, 0, 1 << 40)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    folder = cache.cache_folder("kernels")
    try:
        assert folder.is_dir()
        assert not folder.is_relative_to(tmp_path)
    finally:
        folder.rmdir()
    (line,) = capsys.readouterr().err.splitlines()
    assert "1 MiB of disk left, of 256 MiB" in line


@pytest.mark.parametrize("damage", ["cubin", "record", "json"])
def test_a_damaged_entry_is_compiled_again(tmp_path: Path, damage: str) -> None:
    wanted = [(next(variant for variant in VARIANTS if variant.kernel_name == "count_assignments"), 80)]
    (first,), compiled = compile_all(wanted)
    assert compiled == 1
    assert first.cubin.is_relative_to(tmp_path / "cache")
    assert compile_all(wanted)[1] == 0
    first.cubin.with_suffix(f".{damage}").write_bytes(b"damaged")
    assert compile_all(wanted) == ([first], 1)
