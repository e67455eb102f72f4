"""How often a dead engine is started again."""

from __future__ import annotations

from millstream_runtime.server.engine.restart_policy import (
    RESTART_DELAYS_SECONDS,
    WINDOW_SECONDS,
    restart_delay_seconds,
)


def test_the_first_restart_is_at_once_and_each_next_one_later_until_it_gives_up() -> None:
    deaths = [100.0 + number for number in range(len(RESTART_DELAYS_SECONDS) + 1)]
    delays = [restart_delay_seconds(deaths[: count + 1], RESTART_DELAYS_SECONDS) for count in range(len(deaths))]
    assert delays == [*RESTART_DELAYS_SECONDS, None]
    assert delays[0] == 0.0
    assert list(RESTART_DELAYS_SECONDS) == sorted(RESTART_DELAYS_SECONDS)


def test_deaths_of_long_ago_are_forgiven() -> None:
    deaths = [0.0, 1.0, 2.0, 2.0 + WINDOW_SECONDS]
    assert restart_delay_seconds(deaths, RESTART_DELAYS_SECONDS) == RESTART_DELAYS_SECONDS[0]


def test_without_delays_nothing_is_started_again() -> None:
    assert restart_delay_seconds([5.0], ()) is None
