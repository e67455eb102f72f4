"""A draining server accepts requests while new ones come, but not for ever."""

from __future__ import annotations

import pytest

from millstream_runtime.server.operations.drain import LATEST_SECONDS, DrainCutoff


def closes_at(cutoff: DrainCutoff, began: float, arrivals: list[float]) -> float:
    """When the server refuses requests that come at these times: it asks, waits that long, and asks again."""
    now = began
    while wait := cutoff.seconds_until_close(now, max([began, *(time for time in arrivals if time <= now)])):
        now += wait
    return now


@pytest.mark.parametrize(
    ("what", "arrivals", "closes"),
    [
        ("no request", [], 103.0),
        ("one request", [102.0], 105.0),
        ("a slow node sends requests for long", [101.0, 103.5, 106.0, 108.5], 111.5),
        ("a request after the cutoff", [103.5], 103.0),
        ("requests that never stop", [100.0 + second for second in range(1, 600)], 100.0 + LATEST_SECONDS),
    ],
)
def test_it_closes_when_no_request_has_come_for_a_while(what: str, arrivals: list[float], closes: float) -> None:
    assert closes_at(DrainCutoff.of(100.0, 3.0, 600.0), 100.0, arrivals) == pytest.approx(closes), what


def test_a_short_drain_keeps_half_of_its_time_for_running_requests() -> None:
    endless = [100.0 + second / 2 for second in range(1, 100)]
    assert closes_at(DrainCutoff.of(100.0, 3.0, 20.0), 100.0, endless) == pytest.approx(110.0)
    assert closes_at(DrainCutoff.of(100.0, 3.0, 2.0), 100.0, endless) == pytest.approx(102.0), "never beyond the drain"


def test_ctrl_c_does_not_wait() -> None:
    assert DrainCutoff.of(100.0, 0.0, 600.0).seconds_until_close(100.0, 100.0) == 0.0
