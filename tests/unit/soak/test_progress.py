"""A long proof says how far it is, and at once what went wrong."""

from __future__ import annotations

from tests.soak.progress import EVERY_SECONDS, Progress


def test_it_tells_now_and_then_at_the_end_and_each_problem() -> None:
    lines: list[str] = []
    times = iter([0.0, 1.0, EVERY_SECONDS, EVERY_SECONDS, EVERY_SECONDS + 1, EVERY_SECONDS + 2])
    progress = Progress(lines.append, total=4, clock=lambda: next(times, 2 * EVERY_SECONDS))
    progress.step("quick")
    assert lines == []
    progress.step("later")
    assert lines == ["  2 of 4, 0 not as it should be"]
    progress.step("create, 500 at 3", "no Service")
    assert lines[1:] == ["  create, 500 at 3: no Service", "  3 of 4, 1 not as it should be"]
    progress.step("last")
    assert lines[-1] == "  4 of 4, 1 not as it should be"
