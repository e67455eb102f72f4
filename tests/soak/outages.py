"""No API server for minutes: the operator stays up, and catches up with all that happened meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.soak.api import TooSlow, eventually, is_ready, llmd, llmd_path
from tests.soak.experiments import CREATE, NAME, UPDATE, damage, prepare, reference, spec_a, spec_b
from tests.soak.operator_process import OperatorProcess
from tests.soak.snapshot import Snapshot, differences
from tests.soak.world import OPERATOR_NAMESPACE, World

Result = dict[str, Any]
RECOVER_SECONDS = 120.0
SETTINGS = {
    "MILLSTREAM_LEADER_ELECTION": "Enabled",
    "MILLSTREAM_LEASE_NAME": "outage",
    "MILLSTREAM_OPERATOR_NAMESPACE": OPERATOR_NAMESPACE,
}


async def outage(world: World, *, seconds: float) -> Result:
    """While the operator has no API server, one is created, one changed, one damaged, one deleted."""
    problems: list[str] = []
    async with OperatorProcess(world.plane, "cut-off", SETTINGS) as operator:
        await operator.wait_ready()
        created, updated = await reference(world, operator, CREATE), await reference(world, operator, UPDATE)
        new, changed, damaged, doomed = [await world.namespace(w) for w in ("new", "changed", "damaged", "doomed")]
        for namespace in (changed, damaged, doomed):
            await prepare(world, namespace)
        process = operator.process.popen.pid
        cut = asyncio.create_task(operator.proxy.outage(seconds))
        await asyncio.sleep(seconds / 2)
        healthy_meanwhile = await operator.healthy()
        await world.admin.create(llmd_path(new), llmd(NAME, spec_a()))
        await world.admin.replace_spec(changed, NAME, spec_b())
        await damage(world, damaged)
        await world.admin.delete(llmd_path(doomed, NAME))
        await cut
        loop = asyncio.get_running_loop()
        back = loop.time()
        expected: dict[str, Snapshot] = {
            new: created.state,
            changed: updated.state,
            damaged: created.state,
            doomed: {"counted": {}},
        }

        async def left_to_do() -> list[str]:
            return [
                f"{namespace}: {line}"
                for namespace, state in expected.items()
                for line in differences(state, await world.state(namespace))
                if namespace != doomed or not line.startswith("counted")
            ]

        try:
            await eventually(left_to_do, lambda found: not found, what="recovered", seconds=RECOVER_SECONDS)
            for namespace in (new, changed, damaged):
                await eventually(
                    lambda n=namespace: world.admin.request("GET", llmd_path(n, NAME)),  # type: ignore[misc]
                    is_ready,
                    what="Ready",
                    seconds=RECOVER_SECONDS,
                )
        except TooSlow as error:
            problems.append(str(error))
        return {
            "outage_seconds": seconds,
            "recovered_seconds": round(loop.time() - back, 2),
            "same_process": operator.process.popen.pid == process and operator.process.exit_code is None,
            "healthy_meanwhile": healthy_meanwhile,
            "healthy_after": await operator.healthy(),
            "crashes": operator.crashes,
            "problems": problems,
        }
