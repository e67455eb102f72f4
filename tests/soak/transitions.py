"""A → B → A and A → bad → A, by the hundreds: the way must not show in the end.

Each experiment applies a random spec A, then a random other one, then A again, and compares with A applied fresh in a
namespace beside it. The one in between is mostly one that can be rendered (valid_specs.py). What became of it is seen
and counted: refused by the API server or the planner, not schedulable, rolled out; and whether it changed any object
besides the LLMDeployment. The comparison leaves out what a history rightly
leaves: older ControllerRevisions, and the number of the newest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import yaml

from tests.soak.api import Object, Refused, TooSlow, condition, eventually, is_ready, llmd, llmd_path
from tests.soak.experiments import NAME
from tests.soak.interruption import finished, together
from tests.soak.operator_process import ROOT, OperatorProcess
from tests.soak.progress import Progress, Say, silent
from tests.soak.snapshot import Snapshot, differences
from tests.soak.spec_generator import SpecGenerator, spec_schema
from tests.soak.valid_specs import draw, runnable, takes_anything
from tests.soak.world import World

Result = dict[str, Any]
TOGETHER = 8
SETTLE_SECONDS = 90.0
CALM_SECONDS = 1.5  # no Reconciling, or the same for so long: it has come to its end
ON_ITS_WAY = frozenset({"Starting", "RollingOut", "AskingModel", ""})


@dataclass
class Transition:
    """One experiment: its specs, what became of the one in between, and what was different in the end."""

    number: int
    a: Object
    between: Object
    met: str = ""
    rendered: bool = False  # it changed what the operator makes
    differences: list[str] = field(default_factory=list)


async def transitions(world: World, *, count: int, seed: int, first: int = 0, say: Say = silent) -> Result:
    """`count` experiments under one operator, numbered from `first`."""
    crd = yaml.safe_load(next((ROOT / "crds").glob("*llmdeployments*.yaml")).read_text())
    schema = spec_schema(crd)
    done: list[Transition] = []
    async with OperatorProcess(world.plane, "transitions") as operator:
        await operator.wait_ready()
        planned, progress = iter(range(first, first + count)), Progress(say, count)

        async def run() -> None:
            for number in planned:
                # One generator per experiment: its draws do not depend on the others.
                one = await _transition(world, SpecGenerator(schema, f"{seed}/{number}"), number)
                done.append(one)
                progress.step(f"transition {number}, {one.met}", "; ".join(one.differences))

        ended = await finished(together(run() for _ in range(TOGETHER)))
        failed = [one for one in done if one.differences]
        return {
            "runs": len(done),
            "seed": seed,
            "equal": len(done) - len(failed),
            "reached_a_rendered_change": sum(one.rendered for one in done),
            "first_draw_kept": sum(takes_anything(one.number) for one in done),
            "in_between": dict(Counter(one.met for one in done).most_common()),
            "crashes": operator.crashes,
            "interrupted": not ended,
            "failures": [vars(one) for one in failed],
        }


async def _transition(world: World, generator: SpecGenerator, number: int) -> Transition:
    used, fresh = await world.namespace("run"), await world.namespace("fresh")
    a = await _good_spec(world, generator, used)
    transition = Transition(number, a, await draw(generator, a, number, lambda spec: _admitted(world, used, spec)))
    before = await _rendered(world, used)
    try:
        try:
            await world.admin.replace_spec(used, NAME, transition.between)
        except Refused as error:
            if error.status not in (400, 422):
                raise
            transition.met = "refused by the API server"
        else:
            transition.met = await _settled(world, used)
            transition.rendered = bool(differences(before, await _rendered(world, used)))
            await world.admin.replace_spec(used, NAME, a)
        await world.admin.create(llmd_path(fresh), llmd(NAME, a))
        for namespace in (used, fresh):
            await eventually(lambda n=namespace: _read(world, n), is_ready, what="A Ready", seconds=SETTLE_SECONDS)  # type: ignore[misc]
        scaled = bool(a.get("autoscaling") or transition.between.get("autoscaling"))
        await _equal(world, used, fresh, scaled=scaled)
    except TooSlow as error:
        transition.differences = [str(error)]
    for namespace in (used, fresh):
        await world.admin.delete(llmd_path(namespace, NAME))
    return transition


async def _scale_alike(world: World, used: str, fresh: str) -> None:
    """Give both the same number of replicas.

    An autoscaler without metrics keeps the number that it finds; one that was just removed may have raised it.
    """
    replicas = (await _read(world, fresh))["spec"]["replicas"]
    live = await _read(world, used)
    if live["spec"]["replicas"] != replicas:
        await world.admin.replace_spec(used, NAME, {**live["spec"], "replicas": replicas})


async def _rendered(world: World, namespace: str) -> Snapshot:
    """What the operator makes of a spec: everything but the LLMDeployment itself, and the counts of pods."""
    state = await world.state(namespace)
    return {key: value for key, value in state.items() if key != "counted" and not key.startswith("llmdeployments/")}


async def _admitted(world: World, namespace: str, spec: Object) -> bool:
    """Whether the API server would take the spec in place of the one that is there."""
    path = llmd_path(namespace, NAME)
    live = await world.admin.request("GET", path)
    try:
        await world.admin.request("PUT", path, {**live, "spec": spec}, query={"dryRun": "All"})
    except Refused as error:
        if error.status == 409:
            return await _admitted(world, namespace, spec)
        if error.status not in (400, 422):
            raise
        return False
    return True


async def _good_spec(world: World, generator: SpecGenerator, namespace: str) -> Object:
    """A random spec that becomes Ready, applied."""
    while True:
        spec = generator.mutated(generator.base())
        if not runnable(spec) or _asks_for_keda(spec):
            continue
        try:
            await world.admin.create(llmd_path(namespace), llmd(NAME, spec))
        except Refused:
            continue
        try:
            if await _settled(world, namespace) == "Ready":
                return spec
        except TooSlow:
            pass
        await world.admin.delete(llmd_path(namespace, NAME))
        await eventually(
            lambda: world.state(namespace, history=False), lambda s: s.keys() == {"counted"}, what="gone", seconds=60
        )


def _asks_for_keda(spec: Object) -> bool:
    """This control plane serves no ScaledObject, and a missing kind leaves the autoscaler of the way as it is."""
    return (spec.get("autoscaling") or {}).get("provider") == "KEDA"


async def _equal(world: World, used: str, fresh: str, *, scaled: bool) -> None:
    async def look() -> list[str]:
        if scaled:
            await _scale_alike(world, used, fresh)
        expected, found = await asyncio.gather(*(world.state(n, history=False) for n in (fresh, used)))
        return differences(expected, found)

    await eventually(look, lambda found: not found, what="as a fresh create", seconds=30, pause_seconds=0.5)


async def _settled(world: World, namespace: str) -> str:
    """Wait until the operator has made up its mind about the current generation: `Ready`, or the reason why not."""
    since, seen = 0.0, ""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + SETTLE_SECONDS
    while True:
        manifest = await _read(world, namespace)
        ready = condition(manifest, "Ready")
        current = ready.get("observedGeneration") == manifest["metadata"]["generation"]
        reason = str(ready.get("reason", "")) if current else ""
        if current and (is_ready(manifest) or condition(manifest, "Stalled").get("status") == "True"):
            return reason
        if reason != seen:
            since, seen = loop.time(), reason
        if reason not in ON_ITS_WAY and loop.time() - since > CALM_SECONDS:
            return reason
        if loop.time() > give_up:
            raise TooSlow(f"not settled after {SETTLE_SECONDS:.0f} s: {ready}")
        await asyncio.sleep(0.1)


async def _read(world: World, namespace: str) -> Object:
    return await world.admin.request("GET", llmd_path(namespace, NAME))
