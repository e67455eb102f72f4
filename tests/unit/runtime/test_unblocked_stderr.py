"""A log that is not read holds nothing up: what a full pipe does not take is dropped, counted and reported."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from millstream_runtime import logs
from millstream_runtime.processes.unblocked_stderr import take_dropped_writes, unblocked

PIPE_BYTES = 64 << 10


@contextmanager
def pipe() -> Iterator[tuple[int, io.TextIOWrapper]]:
    """The reading end of a pipe, and its other end as a process has it on standard error."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with open(writer, "w", encoding="utf-8") as stream:  # noqa: PTH123 - a descriptor
        try:
            yield reader, stream
        finally:
            with suppress(OSError):
                os.close(reader)


def read_all(reader: int) -> str:
    """What is in the pipe now."""
    found = b""
    while select.select([reader], [], [], 0)[0]:
        found += os.read(reader, 1 << 16)
    return found.decode()


def test_a_full_pipe_drops_what_it_does_not_take() -> None:
    with pipe() as (reader, stream):
        out = unblocked(stream)
        line = "x" * 999 + "\n"
        for _ in range(2 * PIPE_BYTES // len(line)):
            out.write(line)  # would wait for ever
            out.flush()
        assert take_dropped_writes(out) == 0, "not before there is room to say so"
        taken = read_all(reader)
        assert set(taken.splitlines()) == {line.strip()}
        assert take_dropped_writes(out) == 2 * PIPE_BYTES // len(line) - len(taken.splitlines())
        assert take_dropped_writes(out) == 0


def test_a_line_that_was_cut_ends_before_the_next_one() -> None:
    with pipe() as (reader, stream):
        out = unblocked(stream)
        out.write("y" * (2 * PIPE_BYTES) + "\n")
        assert set(read_all(reader)) == {"y"}
        out.write("next\n")
        assert read_all(reader) == "\nnext\n"
        out.write("after\n")
        assert read_all(reader) == "after\n"


def test_the_log_says_how_many_lines_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    before = root.handlers[:]
    with pipe() as (reader, stream):
        monkeypatch.setattr("sys.stderr", unblocked(stream))
        try:
            logs.configure_logging()
            for _ in range(PIPE_BYTES // 100):
                logs.log.warning("event", text="z" * 200)
            shown = read_all(reader).count("event")
            logs.log.warning("again")
        finally:
            root.handlers[:] = before
        dropped, again = read_all(reader).splitlines()
    assert f"WARNING log_lines_dropped count={PIPE_BYTES // 100 - shown}" in dropped
    assert again.endswith("WARNING again")


def test_a_pipe_without_a_reader_and_a_full_disk_raise_nothing() -> None:
    with pipe() as (reader, stream):
        os.close(reader)
        out = unblocked(stream)
        out.write("lost\n")
        out.flush()
    with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123 - a device
        out = unblocked(full)
        out.write("lost\n")
        out.flush()


def test_what_has_no_descriptor_stays_as_it_is() -> None:
    stream = io.StringIO()
    assert unblocked(stream) is stream
