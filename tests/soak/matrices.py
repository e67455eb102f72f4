"""The matrices: kill at every write, every fault at every request, and both at every request of a start."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from tests.soak import snapshot
from tests.soak.api import TooSlow, eventually, llmd_path
from tests.soak.experiments import (
    NAME,
    SCENARIOS,
    Outcome,
    Reference,
    Scenario,
    experiment,
    injections,
    prepare,
    reference,
    spread,
)
from tests.soak.faults import ANSWERS, KILLS, OF_WRITES, Fault, Injection
from tests.soak.hub_scenarios import HUB_SCENARIOS
from tests.soak.interruption import finished, together
from tests.soak.operator_process import OperatorProcess
from tests.soak.progress import Progress, Say, silent
from tests.soak.snapshot import differences
from tests.soak.world import OPERATOR_NAMESPACE, World

Result = dict[str, Any]
ALL_SCENARIOS = (*SCENARIOS, *HUB_SCENARIOS)
TOGETHER = 8  # parallel experiments
STARTS_TOGETHER = 3
STEADY_SECONDS = 200.0


async def kills(
    world: World,
    *,
    places: int | None = None,
    offset: int = 0,
    how: tuple[Fault, ...] = KILLS,
    scenarios: tuple[Scenario, ...] = ALL_SCENARIOS,
    say: Say = silent,
) -> Result:
    """SIGKILL before and after every write, one after the other; the operator is started again like a pod."""
    outcomes: list[Outcome] = []
    references: dict[Scenario, Reference] = {}
    progress = Progress(say)
    async with OperatorProcess(world.plane, "killed") as operator:
        await operator.wait_ready()

        async def run() -> None:
            for scenario in scenarios:
                expected = references[scenario] = await reference(world, operator, scenario)
                planned = injections(expected, how, only_writes=True, wanted=places, offset=offset)
                progress.total += len(planned)
                for injection in planned:
                    outcomes.append(await experiment(world, operator, scenario, expected, injection))
                    progress.step(*_told(outcomes[-1]))

        done = await finished(run())
        left = await _orphans(world) if done else []
        return _result(outcomes, operator, left, done, references) | {"kills": operator.kills}


async def faults(
    world: World,
    *,
    places: int | None = None,
    offset: int = 0,
    scenarios: tuple[Scenario, ...] = ALL_SCENARIOS,
    say: Say = silent,
) -> Result:
    """Every fault at every request about an object, several namespaces in parallel under one operator."""
    outcomes: list[Outcome] = []
    async with OperatorProcess(world.plane, "troubled") as operator:
        await operator.wait_ready()
        planned: list[tuple[Any, Reference, Injection]] = []
        references: dict[Scenario, Reference] = {}
        for scenario in scenarios:
            expected = references[scenario] = await reference(world, operator, scenario)
            for injection in injections(expected, ANSWERS, only_writes=False, wanted=places, offset=offset):
                planned.append((scenario, expected, injection))
        # Those that keep a worker waiting apart from each other, so that they do not wait for one another.
        waiting = iter(sorted(planned, key=lambda one: (one[2].number, one[2].fault)))
        progress = Progress(say, len(planned))

        async def run() -> None:
            for scenario, expected, injection in waiting:
                outcome = await experiment(world, operator, scenario, expected, injection)
                outcomes.append(outcome)
                progress.step(*_told(outcome))

        done = await finished(together(run() for _ in range(TOGETHER)))
        left = await _orphans(world) if done else []
        return _result(outcomes, operator, left, done, references)


async def starts(
    world: World,
    *,
    places: int | None = None,
    offset: int = 0,
    how: tuple[Fault, ...] = (*ANSWERS, *KILLS),
    say: Say = silent,
) -> Result:
    """Every fault at every request of a process's life until all is steady: listings, watches, the Lease's too."""
    outcomes: list[Outcome] = []
    crashes: list[str] = []
    expected, requests, writes = await _reference_start(world)
    planned = [
        Injection(fault, number, only_writes=fault in OF_WRITES)
        for position, fault in enumerate(how)
        for total in (writes if fault in OF_WRITES else requests,)
        for number in spread(total, total if places is None else places, offset + position)
    ]
    waiting, progress = iter(planned), Progress(say, len(planned))

    async def run(lane: int) -> None:
        for injection in waiting:
            outcome = Outcome("start", str(injection.fault), injection.number)
            namespace = await world.namespace("start")
            async with _elected(world, namespace, f"start-{lane}") as operator:
                operator.proxy.plan.injections[""] = injection
                loop = asyncio.get_running_loop()
                began = loop.time()
                try:
                    await prepare(world, namespace)
                    await _same(world, namespace, expected)
                    outcome.seconds = round(loop.time() - began, 2)
                except TooSlow as error:
                    outcome.differences = [str(error)]
                outcome.struck = str(injection.struck).replace(namespace, "NAMESPACE") if injection.struck else ""
                crashes.extend(operator.crashes)
            outcomes.append(outcome)
            progress.step(*_told(outcome))
            await world.admin.delete(llmd_path(namespace, NAME))

    done = await finished(together(run(lane) for lane in range(STARTS_TOGETHER)))
    return _summary(outcomes) | {"crashes": crashes, "interrupted": not done}


def _told(outcome: Outcome) -> tuple[str, str]:
    where = f"{outcome.scenario}, {outcome.fault} at {outcome.number} ({outcome.struck})"
    return where, "; ".join(outcome.differences)


def _elected(world: World, namespace: str, name: str) -> OperatorProcess:
    settings = {
        "MILLSTREAM_WATCH_NAMESPACES": namespace,
        "MILLSTREAM_LEADER_ELECTION": "Enabled",
        "MILLSTREAM_LEASE_NAME": namespace,
        "MILLSTREAM_OPERATOR_NAMESPACE": OPERATOR_NAMESPACE,
    }
    return OperatorProcess(world.plane, name, settings)


async def _reference_start(world: World) -> tuple[dict[str, Any], int, int]:
    """The fault-free state; how many requests a start takes until it is reached, and how many of them write."""
    namespace = await world.namespace("start")
    async with _elected(world, namespace, "start-reference") as operator:
        await prepare(world, namespace)
        asked = [exchange.asked for exchange in operator.proxy.exchanges]
        state = await world.state(namespace)
    await world.admin.delete(llmd_path(namespace, NAME))  # a later operator would say whose it is
    return state, len(asked), sum(one.writes for one in asked)


async def _same(world: World, namespace: str, expected: dict[str, Any]) -> None:
    async def left_to_do() -> list[str]:
        return differences(expected, await world.state(namespace))

    await eventually(
        left_to_do, lambda found: not found, what="as without a fault", seconds=STEADY_SECONDS, pause_seconds=0.5
    )


async def _orphans(world: World) -> list[str]:
    """When every experiment's LLMDeployment is deleted: what is left in their namespaces."""

    async def look() -> list[str]:
        everything = await snapshot.read_all(world.admin, world.kinds)
        return [
            f"{namespace}: {key}"
            for namespace, found in everything.items()
            if namespace.startswith("run-")
            for key in snapshot.of_namespace(found)
            if key != "counted"
        ]

    try:
        await eventually(look, lambda found: not found, what="empty", seconds=60, pause_seconds=1)
    except TooSlow:
        return await look()
    return []


def _result(
    outcomes: Iterable[Outcome],
    operator: OperatorProcess,
    orphans: list[str],
    done: bool,
    references: Mapping[Scenario, Reference],
) -> Result:
    counts = {"crashes": operator.crashes, "orphans": orphans, "interrupted": not done}
    return {"scenarios": covered(references)} | _summary(outcomes) | counts


def covered(references: Mapping[Scenario, Reference]) -> Result:
    """What each scenario is about, and how often its fault-free run wrote to each kind of object."""
    return {
        scenario.name: {
            "about": scenario.about,
            "writes": dict(sorted(Counter(one.resource for one in found.requests if one.writes).items())),
        }
        for scenario, found in references.items()
    }


def _summary(outcomes: Iterable[Outcome]) -> Result:
    """Counts, a row for each scenario and fault, and every place that was hit."""
    outcomes = sorted(outcomes, key=lambda one: (one.scenario, one.fault, one.number))
    table: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        row = table.setdefault(
            f"{outcome.scenario}: {outcome.fault}",
            {"runs": 0, "struck": 0, "converged": 0, "slowest_seconds": 0.0, "places": []},
        )
        row["runs"] += 1
        row["struck"] += bool(outcome.struck)
        row["converged"] += not outcome.differences
        row["slowest_seconds"] = max(row["slowest_seconds"], outcome.seconds)
        row["places"].append(f"{outcome.number}: {outcome.struck or 'no such request'}, {outcome.seconds} s")
    return {
        "runs": len(outcomes),
        "struck": sum(bool(one.struck) for one in outcomes),
        "converged": sum(not one.differences for one in outcomes),
        "table": table,
        "failures": [asdict(one) for one in outcomes if one.differences],
    }
