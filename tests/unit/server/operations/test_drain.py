"""A draining server's door stays open as long as somebody comes, and not for ever."""

from __future__ import annotations

import pytest

from millstream_runtime.server.operations.drain import LATEST_SECONDS, DrainDoor


def closes_at(door: DrainDoor, began: float, arrivals: list[float]) -> float:
    """When the door closes if people come at these times: the server looks, waits as told, and looks again."""
    now = began
    while wait := door.wait_seconds(now, max([began, *(time for time in arrivals if time <= now)])):
        now += wait
    return now


@pytest.mark.parametrize(
    ("what", "arrivals", "closes"),
    [
        ("nobody comes", [], 103.0),
        ("one comes", [102.0], 105.0),
        ("a slow node sends people for long", [101.0, 103.5, 106.0, 108.5], 111.5),
        ("after it closed nobody opens it", [103.5], 103.0),
        ("somebody never stops", [100.0 + second for second in range(1, 600)], 100.0 + LATEST_SECONDS),
    ],
)
def test_it_closes_when_nobody_has_come_for_a_while(what: str, arrivals: list[float], closes: float) -> None:
    assert closes_at(DrainDoor.of(100.0, 3.0, 600.0), 100.0, arrivals) == pytest.approx(closes), what


def test_a_short_drain_keeps_half_of_its_time_for_what_runs() -> None:
    endless = [100.0 + second / 2 for second in range(1, 100)]
    assert closes_at(DrainDoor.of(100.0, 3.0, 20.0), 100.0, endless) == pytest.approx(110.0)
    assert closes_at(DrainDoor.of(100.0, 3.0, 2.0), 100.0, endless) == pytest.approx(102.0), "never beyond the drain"


def test_ctrl_c_waits_for_nobody() -> None:
    assert DrainDoor.of(100.0, 0.0, 600.0).wait_seconds(100.0, 100.0) == 0.0
