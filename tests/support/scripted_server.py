"""An HTTP server on a real socket that sends prepared answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from millstream.bench.client import Endpoint, HttpClient

OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def scripted(*answers: bytes, close: bool = False) -> AsyncIterator[tuple[HttpClient, list[bytes]]]:
    """A server that gives `answers` in turn, on one connection or (`close`) one each; and what it was sent."""
    left, seen = list(answers), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while left:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            length = next((int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.startswith(b"Content-Length")), 0)
            seen.append(head + await reader.readexactly(length))
            for byte in left.pop(0):  # one byte at a time: no boundary may matter
                writer.write(bytes([byte]))
                await writer.drain()
            if close:
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = HttpClient(Endpoint.parse(f"http://127.0.0.1:{port}"), timeout_seconds=20)
        yield client, seen
        await client.close()
