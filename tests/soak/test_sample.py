"""A sample of each proof, small enough for every day; `make soak` runs them in full.

Which requests are hit, and which specs are drawn, the seed decides: another one every day, printed at the top.
"""

from __future__ import annotations

import pytest

from tests.soak.deletions import deletions
from tests.soak.experiments import SCENARIOS, Scenario
from tests.soak.faults import ANSWERS, KILLS
from tests.soak.hub_scenarios import HUB_SCENARIOS
from tests.soak.leaders import leaders
from tests.soak.matrices import faults, kills, starts
from tests.soak.outages import outage
from tests.soak.results import missed
from tests.soak.scale import scale
from tests.soak.simulated_nodes import NODES
from tests.soak.tools import Tools
from tests.soak.transitions import transitions
from tests.soak.two_releases import two_releases
from tests.soak.world import World, world

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900), pytest.mark.deep]


# Six of the ten scenarios a day, by turns, at least two of them with the hub's: as long as all six of the small one.
IN_A_SAMPLE = 6


def of_the_day(seed: int) -> tuple[Scenario, ...]:
    hub = [HUB_SCENARIOS[(seed + step) % len(HUB_SCENARIOS)] for step in range(2)]
    small = [SCENARIOS[(seed + step) % len(SCENARIOS)] for step in range(IN_A_SAMPLE - len(hub))]
    return (*small, *hub)


async def test_killed_at_a_write_of_each_scenario_it_comes_to_the_same_end(where: World, seed: int) -> None:
    result = await kills(where, places=1, offset=seed, how=(KILLS[seed % 2],), scenarios=of_the_day(seed))
    assert missed("kills", result) == []
    assert result["kills"] == result["struck"] >= 4


async def test_with_each_fault_at_a_request_of_each_scenario_it_comes_to_the_same_end(where: World, seed: int) -> None:
    result = await faults(where, places=1, offset=seed, scenarios=of_the_day(seed))
    assert missed("faults", result) == []
    assert result["struck"] >= len(ANSWERS) * 4


async def test_with_a_fault_in_its_first_seconds_it_starts_all_the_same(where: World, seed: int) -> None:
    result = await starts(where, places=1, offset=seed, how=(KILLS[seed % 2], ANSWERS[seed % 3]))
    assert missed("starts", result) == []


async def test_without_an_api_server_it_waits_and_then_catches_up(where: World) -> None:
    result = await outage(where, seconds=8)
    assert [line for line in missed("outage", result) if "_seconds" not in line] == []


async def test_a_leader_that_is_killed_is_followed_by_one_that_alone_writes(where: World) -> None:
    result = await leaders(where, rounds=1, ways=("killed",))
    assert [line for line in missed("leaders", result) if "_seconds" not in line] == []
    assert result["terms"] >= 2
    assert result["writes"] > 0


async def test_a_way_back_leaves_no_trace(where: World, seed: int) -> None:
    result = await transitions(where, count=6, seed=seed)
    assert missed("transitions", result) == []


async def test_at_rest_it_writes_nothing_and_neither_does_a_restart(where: World) -> None:
    result = await scale(where, objects=16, samples=3, idle_seconds=5, yardstick=False)
    assert [result[word]["written"] for word in ("idle", "restart", "idle after the restart")] == [[], [], []]
    assert result["crashes"] == []


async def test_what_is_deleted_stops_serving_without_a_garbage_collector(programs: Tools) -> None:
    async with world(programs, nodes=NODES, collects_garbage=False) as without:
        result = await deletions(without, objects=12)
    assert missed("deletions", result) == []


async def test_a_second_release_writes_nothing_to_what_the_first_one_manages(where: World) -> None:
    result = await two_releases(where, objects=3, seconds=6)
    assert missed("releases", result) == []
