"""A client that hangs up before its answer is complete: noticed at once, so that the engine stops working for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Receive


class ClientGoneError(Exception):
    """Nobody is left to answer."""


@contextmanager
def watching(receive: Receive, on_gone: Callable[[], None]) -> Iterator[None]:
    """While the block runs, call `on_gone` once if the client hangs up. The request's body must have been read.

    One task beside the block, which goes on undisturbed: a block that is a task of its own, to be cancelled, would cost
    three more and a race between the answer and the hang-up.
    """
    task = asyncio.get_running_loop().create_task(_watch(receive, on_gone))
    try:
        yield
    finally:
        task.cancel()


async def _watch(receive: Receive, on_gone: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()
