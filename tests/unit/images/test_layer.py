"""A layer's bytes depend on names, content and the executable bit, and on nothing else."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

from hack.images.layer import Entry, content_hash, copy_entries, entries_below, write_layer


def tree(folder: Path) -> Path:
    (folder / "pkg" / "deep").mkdir(parents=True)
    (folder / "pkg" / "module.py").write_text("x = 1\n")
    (folder / "pkg" / "deep" / "data.bin").write_bytes(bytes(range(256)))
    script = folder / "tool"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o700)
    (folder / "link").symlink_to("tool")
    return folder


def tar_of(entries: list[Entry], target: str = "/opt/app") -> bytes:
    out = io.BytesIO()
    write_layer(entries, target, out)
    return out.getvalue()


def test_two_checkouts_give_the_same_bytes(tmp_path: Path) -> None:
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    os.utime(two / "pkg" / "module.py", (1, 1))
    (two / "pkg" / "module.py").chmod(0o600)
    assert tar_of(entries_below(one)) == tar_of(list(reversed(entries_below(two))))
    assert content_hash(entries_below(one)) == content_hash(entries_below(two))


def test_a_layer_is_a_tar_with_every_folder_owned_by_root(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(tar_of(entries_below(tree(tmp_path / "t"))))) as tar:
        members = {member.name: member for member in tar.getmembers()}
        content = tar.extractfile("opt/app/pkg/deep/data.bin")
        assert content is not None
        assert content.read() == bytes(range(256))
    assert list(members) == [
        "opt/app",
        "opt/app/link",
        "opt/app/pkg",
        "opt/app/pkg/deep",
        "opt/app/pkg/deep/data.bin",
        "opt/app/pkg/module.py",
        "opt/app/tool",
    ]
    assert {(member.uid, member.gid) for member in members.values()} == {(0, 0)}
    assert members["opt/app/tool"].mode == 0o755
    assert members["opt/app/pkg/module.py"].mode == 0o644
    assert members["opt/app/link"].linkname == "tool"


def test_the_hash_sees_content_names_and_the_executable_bit(tmp_path: Path) -> None:
    folder = tree(tmp_path / "t")
    seen = {content_hash(entries_below(folder))}
    (folder / "pkg" / "module.py").write_text("x = 2\n")
    seen.add(content_hash(entries_below(folder)))
    (folder / "pkg" / "module.py").chmod(0o755)
    seen.add(content_hash(entries_below(folder)))
    (folder / "pkg" / "module.py").rename(folder / "pkg" / "other.py")
    seen.add(content_hash(entries_below(folder)))
    assert len(seen) == 4


def test_entries_laid_out_elsewhere_are_the_same_entries(tmp_path: Path) -> None:
    entries = entries_below(tree(tmp_path / "t"))
    copy_entries(entries, tmp_path / "copy")
    assert content_hash(entries_below(tmp_path / "copy")) == content_hash(entries)
