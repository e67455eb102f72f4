"""A line that is drawn again fits in one row of the terminal: of one that wraps only the last row would be cleared."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from millstream.output_streams import columns_of, one_row
from millstream_operator.api.load import parse
from millstream_operator.explaining.plan_table import plan_table
from millstream_operator.explaining.text import Style
from millstream_operator.planning.plan import Infeasible
from tests.support.llmdeployments import manifest


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    """Yield a terminal of 24 columns."""
    controller, follower = os.openpty()
    rows, columns = 10, 24
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with os.fdopen(follower, "w") as stream:
        yield stream
    os.close(controller)


def test_what_is_longer_than_a_row_is_cut(terminal: TextIO) -> None:
    assert one_row("x" * 23, terminal) == "x" * 23
    assert one_row("abcdefghijklmnopqrstuvwxyz", terminal) == "abcdefghijklmnopqrstuv…"
    assert len(one_row("x" * 24, terminal)) < 24, "a full row already begins the next one on some terminals"


def test_what_is_no_terminal_has_no_rows(tmp_path: os.PathLike[str]) -> None:
    with open(os.path.join(tmp_path, "file"), "w") as file:  # noqa: PTH118, PTH123 - a path of pytest's
        assert columns_of(file) is None
        assert one_row("x" * 500, file) == "x" * 500
    assert one_row("x" * 500, io.StringIO()) == "x" * 500


def test_the_prose_of_a_plan_follows_the_width() -> None:
    message = "No GPU that the cluster has free holds the weights of this model. " * 3
    found = Infeasible("memory", message.strip(), "")
    name = parse(manifest()).name
    for width in (60, 90, 118):
        lines = plan_table(name, found, Style(unicode=False, width=width)).splitlines()
        assert width - 20 < max(map(len, lines)) <= width
