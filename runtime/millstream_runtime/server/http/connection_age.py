"""End an old connection with an answer: `Connection: close` in its headers, and it closes after the last piece."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def last_on_connection(app: ASGIApp, cycle: RequestResponseCycle, is_last: Callable[[], bool]) -> ASGIApp:
    """Wrap `app` for one request. `is_last`: asked when the answer begins; False where another request came already."""

    async def last(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and is_last():
                cycle.keep_alive = False  # uvicorn writes the header, and closes after the last piece
            await send(message)

        await app(scope, receive, send_last)

    return last
