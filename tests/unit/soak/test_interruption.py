"""An interrupted proof goes on to tell what it found."""

from __future__ import annotations

import asyncio

from tests.soak.interruption import finished


async def test_what_was_found_before_ctrl_c_is_kept() -> None:
    found: list[int] = []
    begun = asyncio.Event()

    async def lane(number: int) -> None:
        found.append(number)
        begun.set()
        await asyncio.Event().wait()

    async def lanes() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(lane(number))

    async def proof() -> tuple[bool, list[int]]:
        done = await finished(lanes())
        await asyncio.sleep(0)  # cleaning up may wait
        return done, found

    task = asyncio.create_task(proof())
    await begun.wait()
    task.cancel()  # as asyncio.run does on Ctrl-C
    assert await task == (False, [0, 1, 2])


async def test_work_that_comes_to_its_end_is_finished() -> None:
    assert await finished(asyncio.sleep(0))
