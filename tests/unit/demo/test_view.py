"""A log gets each line once; a terminal is rewritten in place."""

from __future__ import annotations

import io

from hack.demo.view import LiveOutput


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_when_it_is_new() -> None:
    out = io.StringIO()
    with LiveOutput(out) as view:
        view.show(["waiting", "pod a"])
        view.show(["waiting", "pod a"])
        view.show(["waiting", "pod b"])
    said = [line.split(" s  ")[1] for line in out.getvalue().splitlines()]
    assert said == ["waiting", "pod a", "pod b"]
    assert "\x1b" not in out.getvalue()


def test_a_terminal_is_cleared_by_as_many_lines_as_were_drawn() -> None:
    out = Terminal()
    with LiveOutput(out) as view:
        view.show(["one", "two", "three"])
        drawn = len(out.getvalue())
        view.show(["done"])
    assert out.getvalue()[drawn:].startswith("\x1b[1A\x1b[2K" * 3)
    assert out.getvalue().endswith("  done\n"), "the last state stays"
