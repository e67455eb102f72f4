"""Files that `quality` and `bench` save: whole, never over what is read, and never in the place of a device."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from millstream.saved_files import check_saved_files, write_saved_file
from millstream_runtime.errors import InvalidConfigError, RuntimeFailure


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("before")
    with path.open() as opened:
        write_saved_file(path, "after ×")
        assert opened.read() == "before", "who reads the old file never sees half of the new one"
    assert path.read_text(encoding="utf-8") == "after ×"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_to_a_device_stays_a_link(tmp_path: Path) -> None:
    """/dev/stdout is one: to replace it breaks every program of the machine that writes there."""
    path = tmp_path / "stdout"
    path.symlink_to("/dev/null")
    check_saved_files({"--json": path})
    write_saved_file(path, "text")
    assert path.readlink() == Path("/dev/null")
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_gets_the_text_and_stays_a_pipe(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    check_saved_files({"--json": path})
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    write_saved_file(path, "text")
    reader.join(60)
    assert read == ["text"]
    assert path.is_fifo()


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("{}")
    (tmp_path / "link").symlink_to(data)
    for path in (data, tmp_path / "link", tmp_path / "." / "data.jsonl"):
        with pytest.raises(InvalidConfigError, match=f"--json is {path}, which is read; give another file"):
            check_saved_files({"--json": path, "--page": None}, [data])


def test_two_results_need_two_files(tmp_path: Path) -> None:
    path = tmp_path / "report"
    with pytest.raises(InvalidConfigError, match=r"--json and --page are both .*; give each a file of its own"):
        check_saved_files({"--json": path, "--page": path})
    (tmp_path / "null").symlink_to("/dev/null")
    check_saved_files({"--json": tmp_path / "null", "--page": tmp_path / "null"})


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "report.json"
    with pytest.raises(RuntimeFailure, match=f"Cannot write {path}: No such file or directory"):
        write_saved_file(path, "text")
