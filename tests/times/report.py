"""Times as text: the largest of a run, and two runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tests.times.file import Seconds, Times

LARGEST = 10
TITLES = ("stage", "test file", "end-to-end test")


def largest(times: Times, count: int = LARGEST) -> str:
    """The stages, test files and end-to-end tests that took longest: one table each, by wall seconds."""
    tables = []
    for title, rows in zip(TITLES, _parts(times), strict=True):
        slowest = sorted(rows.items(), key=lambda row: -row[1].wall)[:count]
        if slowest:
            lines = [f"{seconds.wall:8.0f} {seconds.cpu:8.0f}  {name}" for name, seconds in slowest]
            tables.append("\n".join([f"{'wall s':>8} {'CPU s':>8}  {title}", *lines]))
    return "\n\n".join(tables)


def compared(before: Times, after: Times, count: int = LARGEST) -> str:
    """Sums, and the entries whose CPU or wall seconds changed most: before, after, and their ratio."""
    tables = []
    for title, old, new in zip(TITLES, _parts(before), _parts(after), strict=True):
        if not old and not new:
            continue
        changed = sorted({*old, *new}, key=lambda name: -_change(old.get(name), new.get(name)))[:count]
        lines = [
            _line("all", _total(old), _total(new)),
            *(_line(name, old.get(name), new.get(name)) for name in changed),
        ]
        heading = f"{'wall s':>8}    {'':>8} {'':>6} {'CPU s':>8}    {'':>8} {'':>6}  {title}"
        tables.append("\n".join([heading, *lines]))
    return "\n\n".join(tables)


def _parts(times: Times) -> Iterator[Mapping[str, Seconds]]:
    yield times.stages
    yield times.files()
    yield times.tests()


def _total(rows: Mapping[str, Seconds]) -> Seconds:
    return sum(rows.values(), Seconds())


def _change(old: Seconds | None, new: Seconds | None) -> float:
    old, new = old or Seconds(), new or Seconds()
    return max(abs(new.wall - old.wall), abs(new.cpu - old.cpu))


def _line(name: str, old: Seconds | None, new: Seconds | None) -> str:
    def columns(before: float | None, after: float | None) -> str:
        ratio = f"{after / before:6.2f}" if before and after is not None else f"{'':6}"
        cells = ["–" if seconds is None else f"{seconds:.0f}" for seconds in (before, after)]
        return f"{cells[0]:>8} -> {cells[1]:>8} {ratio}"

    walls = columns(old.wall if old else None, new.wall if new else None)
    return f"{walls} {columns(old.cpu if old else None, new.cpu if new else None)}  {name}"
