"""One LLMDeployment in a namespace of its own goes through a change while one thing goes wrong.

A scenario is prepared without faults, then changed; it has converged when the namespace holds exactly what it holds
after the same change without a fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.soak.api import Object, TooSlow, eventually, is_ready, llmd, llmd_path
from tests.soak.faults import OF_WRITES, Asked, Fault, Injection
from tests.soak.operator_process import OperatorProcess
from tests.soak.snapshot import Snapshot, differences
from tests.soak.world import World

NAME = "demo"
PREPARE_SECONDS = 120.0
CONVERGE_SECONDS = 240.0
# Long enough for what the operator still does when all is well: an Event, a second look.
AFTERMATH_SECONDS = 1.0


def spec_a() -> Object:
    """Two replicas, so that there is a PodDisruptionBudget, too."""
    return {
        "model": {"servedName": "demo-chat", "source": {"local": {"path": "demo-chat"}}},
        "accelerator": {"type": "CPU"},
        "engine": {"maxModelLen": 2048},
        "replicas": 2,
    }


def spec_b() -> Object:
    """Other pods, another port, and one kind of object less."""
    return spec_a() | {
        "engine": {"maxModelLen": 1024, "maxNumSeqs": 8},
        "service": {"port": 8080},
        "replicas": 1,
        "podTemplate": {"metadata": {"labels": {"team": "search"}}},
    }


Step = Callable[[World, str], Awaitable[None]]


async def _create_small(world: World, namespace: str) -> None:
    await world.admin.create(llmd_path(namespace), llmd(NAME, spec_a()))


@dataclass(frozen=True)
class Scenario:
    """`prepare` is waited for and suffers nothing; `change` is what the faults meet."""

    name: str
    prepared: bool
    change: Step
    ends_ready: bool = True
    start: Step = _create_small
    ended: Callable[[Object], bool] = is_ready  # where it ends with an LLMDeployment that works
    about: str = "CPU, model in the image"
    # Done at the moment when the fault strikes: the user's next step comes at the worst time.
    at_strike: Step | None = None


async def _update(world: World, namespace: str) -> None:
    await world.admin.replace_spec(namespace, NAME, spec_b())


async def _delete(world: World, namespace: str) -> None:
    await world.admin.delete(llmd_path(namespace, NAME))


async def _replace(world: World, namespace: str) -> None:
    """Deleted, and created again before the garbage collector was there."""
    await _delete(world, namespace)
    await world.admin.create(llmd_path(namespace), llmd(NAME, spec_b()))


async def damage(world: World, namespace: str) -> None:
    """A child is deleted, two others are edited by hand."""
    await world.admin.delete(f"/api/v1/namespaces/{namespace}/services/{NAME}")
    await world.admin.merge(f"/apis/apps/v1/namespaces/{namespace}/deployments/{NAME}", {"spec": {"replicas": 1}})
    await world.admin.merge(
        f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies/{NAME}", {"spec": {"ingress": []}}
    )


CREATE = Scenario("create", False, _create_small)
UPDATE = Scenario("update", True, _update)
DELETE = Scenario("delete", True, _delete, ends_ready=False)
# A delete that finds everything done causes no write, so the delete also comes in the middle of a create.
ABANDON = Scenario("create, deleted meanwhile", False, _create_small, ends_ready=False, at_strike=_delete)
REPLACE = Scenario("delete and create again", True, _replace)
REPAIR = Scenario("repair", True, damage)
SCENARIOS = (CREATE, UPDATE, DELETE, ABANDON, REPLACE, REPAIR)


@dataclass
class Outcome:
    """What came of one experiment. `differences` is empty when it converged."""

    scenario: str
    fault: str
    number: int
    struck: str = ""  # the request that was hit; empty: there were fewer requests than that
    seconds: float = 0.0  # from the change to the fault-free state
    differences: list[str] = field(default_factory=list)


@dataclass
class Reference:
    """The fault-free run."""

    state: Snapshot
    requests: list[Asked]

    def count(self, *, only_writes: bool, about_events: bool) -> int:
        """Requests of a sort."""
        return sum(one.about_events is about_events and (one.writes or not only_writes) for one in self.requests)


async def reference(world: World, operator: OperatorProcess, scenario: Scenario) -> Reference:
    """Run it without a fault: the state that all others must come to, and the requests that can be hit."""
    namespace = await world.namespace("reference")
    if scenario.prepared:
        await prepare(world, namespace, scenario)
    began = asyncio.get_running_loop().time()
    await scenario.change(world, namespace)
    if scenario.at_strike is not None:
        await _until(world, namespace, is_ready)
        await scenario.at_strike(world, namespace)
    if scenario.ends_ready:
        await _until(world, namespace, scenario.ended)
    else:
        await eventually(
            lambda: world.state(namespace), lambda state: not _left(state), what="gone", seconds=PREPARE_SECONDS
        )
    await asyncio.sleep(AFTERMATH_SECONDS)
    if scenario.ends_ready:
        await _until(world, namespace, scenario.ended)
    state = await _settled_state(world, namespace)
    asked = [x.asked for x in operator.proxy.exchanges if x.asked.namespace == namespace and x.asked.at >= began]
    return Reference(state, [one for one in asked if not one.watch])


async def _settled_state(world: World, namespace: str) -> Snapshot:
    """What a namespace comes to: the first state that lasts. Damage, for one, is Ready until somebody notices it."""

    async def lasting() -> tuple[Snapshot, Snapshot]:
        before = await world.state(namespace)
        await asyncio.sleep(AFTERMATH_SECONDS)
        return before, await world.state(namespace)

    def lasts(pair: tuple[Snapshot, Snapshot]) -> bool:
        return not differences(*pair)

    return (await eventually(lasting, lasts, what="at rest", seconds=PREPARE_SECONDS))[1]


async def prepare(world: World, namespace: str, scenario: Scenario | None = None) -> None:
    """Create what the scenario begins with, and wait until it is Ready."""
    await (scenario.start if scenario else _create_small)(world, namespace)
    await _until(world, namespace, is_ready)
    await asyncio.sleep(AFTERMATH_SECONDS)


async def experiment(
    world: World, operator: OperatorProcess, scenario: Scenario, expected: Reference, injection: Injection
) -> Outcome:
    """One change, one fault; waits until the namespace is as in the reference."""
    outcome = Outcome(scenario.name, str(injection.fault), injection.number)
    namespace = await world.namespace("run")
    loop = asyncio.get_running_loop()
    try:
        if scenario.prepared:
            await prepare(world, namespace, scenario)
        operator.proxy.plan.injections[namespace] = injection
        began = loop.time()
        await scenario.change(world, namespace)
        if scenario.at_strike is not None:
            await _until_struck(world, namespace, injection)
            await scenario.at_strike(world, namespace)
        await _converged(world, namespace, scenario, expected)
        outcome.seconds = round(loop.time() - began, 2)
    except TooSlow as error:
        outcome.differences = [str(error)]
    outcome.struck = str(injection.struck).replace(namespace, "NAMESPACE") if injection.struck else ""
    operator.proxy.plan.injections.pop(namespace, None)
    await world.admin.delete(llmd_path(namespace, NAME))
    return outcome


async def _converged(world: World, namespace: str, scenario: Scenario, expected: Reference) -> None:
    if scenario.ends_ready:
        await _until(world, namespace, scenario.ended)

    async def left_to_do() -> list[str]:
        return differences(expected.state, await world.state(namespace))

    def none(found: list[str]) -> bool:
        return not found

    await eventually(left_to_do, none, what="as without a fault", seconds=CONVERGE_SECONDS, pause_seconds=0.5)
    # And it stays so: what the operator believes must be what is.
    await asyncio.sleep(AFTERMATH_SECONDS)
    await eventually(left_to_do, none, what="still as without a fault", seconds=CONVERGE_SECONDS, pause_seconds=0.5)


async def _until(world: World, namespace: str, ended: Callable[[Object], bool]) -> None:
    async def look() -> Object:
        return await world.admin.get(llmd_path(namespace, NAME)) or {"metadata": {"generation": -1}}

    await eventually(look, ended, what=ended.__name__.replace("is_", ""), seconds=CONVERGE_SECONDS)


async def _until_struck(world: World, namespace: str, injection: Injection) -> None:
    """Or until it is Ready without: steps of a status may fall together, so a run may ask less than the reference."""

    async def look() -> bool:
        if injection.struck is not None:
            return True
        return is_ready(await world.admin.get(llmd_path(namespace, NAME)) or {"metadata": {"generation": -1}})

    await eventually(look, bool, what="struck", seconds=PREPARE_SECONDS, pause_seconds=0.005)
    if injection.struck is None:
        await asyncio.sleep(AFTERMATH_SECONDS)


def _left(state: Snapshot) -> list[str]:
    """The rest of the result, besides the counts."""
    return [key for key in state if key != "counted"] + [key for key, count in state["counted"].items() if count]


def spread(total: int, wanted: int, offset: int) -> list[int]:
    """`wanted` of the numbers 1 to `total`, evenly apart, turned by `offset`: a sample that meets every phase."""
    if wanted >= total:
        return list(range(1, total + 1))
    return sorted({1 + (offset + step * total // wanted) % total for step in range(wanted)})


def injections(
    expected: Reference, faults: tuple[Fault, ...], *, only_writes: bool, wanted: int | None, offset: int
) -> list[Injection]:
    """Every fault at every request it can come to (or write), or `wanted` places of them a fault.

    Those about Events are counted apart, and left out of a sample: a run may do with fewer of them.
    """
    return [
        Injection(fault, number, only_writes=writes, about_events=events)
        for position, fault in enumerate(faults)
        for writes in (only_writes or fault in OF_WRITES,)
        for events in ((False, True) if wanted is None else (False,))
        for total in (expected.count(only_writes=writes, about_events=events),)
        for number in spread(total, total if wanted is None else wanted, offset + position)
    ]
