"""Tokens that a client did not take in time: none is lost, and those who wait meanwhile get their turn."""

from __future__ import annotations

import asyncio

from millstream_runtime.engine.request import FinishReason, TokenOutput
from millstream_runtime.server.engine.output_queue import MAX_TOKENS_PER_GET, OutputQueue

BACKLOG = 10 * MAX_TOKENS_PER_GET + 1


def test_a_backlog_of_thousands_is_taken_in_turns_with_others() -> None:
    taken, others = asyncio.run(take_backlog())
    assert [output.token_id for piece in taken for output in piece] == list(range(BACKLOG))
    assert max(len(piece) for piece in taken) <= MAX_TOKENS_PER_GET
    assert others >= len(taken) - 2, "another task runs between two pieces"  # it counts after its first turn


def test_after_a_backlog_the_queue_waits_again() -> None:
    async def idle() -> list[tuple[float, TokenOutput]]:
        queue = OutputQueue()
        for token in range(MAX_TOKENS_PER_GET):
            queue.put(0.0, TokenOutput("r", token))
        await queue.get(None)
        waiting = asyncio.ensure_future(queue.get(None))
        await asyncio.sleep(0)
        assert not waiting.done()
        queue.put(0.0, TokenOutput("r", MAX_TOKENS_PER_GET, FinishReason.LENGTH))
        return await waiting

    assert [output.token_id for _, output in asyncio.run(idle())] == [MAX_TOKENS_PER_GET]


async def take_backlog() -> tuple[list[list[TokenOutput]], int]:
    """What each `get` returned until the last token, and how often another task ran meanwhile."""
    queue, turns = OutputQueue(tokens_per_wakeup=16), 0
    taken: list[list[TokenOutput]] = []

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    for token in range(BACKLOG):
        queue.put(0.0, TokenOutput("r", token, FinishReason.LENGTH if token == BACKLOG - 1 else None))
    task = asyncio.ensure_future(other())
    while not taken or taken[-1][-1].finish_reason is None:
        taken.append([output for _, output in await queue.get(None)])
    task.cancel()
    return taken, turns
