"""A connection on which the head of an answer leaves together with what follows it at once.

uvicorn writes the head and the body apart: two calls into the kernel, two packets, and a client that wakes twice.

    write(head)              held
    write(body)              head + body, in one piece
    the loop's next round    head alone: a stream whose first token is still to come

Only a head is ever held, and never longer than to the end of the current turn of the event loop. The pieces of a stream
leave when they are written. A large piece goes behind the head as it is, uncopied. What is held is a few hundred bytes,
so the transport's own flow control stays exact for all that matters.
"""

from __future__ import annotations

import asyncio
from typing import Any

JOINED_BYTES = 64 << 10  # copying less than this costs less than a second write


class HeldHead(asyncio.Transport):
    """Wraps the transport of one connection; the first write and the first one after `expect_head` are held."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._held = b""
        self._expects_head = True

    def expect_head(self) -> None:
        """An answer is complete: what comes next begins another."""
        self.flush()
        self._expects_head = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._held and len(data) <= JOINED_BYTES:
            held, self._held = self._held, b""
            self._transport.write(b"".join((held, data)))
        elif self._expects_head:
            self._expects_head = False
            self._held = bytes(data)
            self._loop.call_soon(self.flush)
        else:
            self.flush()
            self._transport.write(data)

    def flush(self) -> None:
        """Send what is held."""
        held, self._held = self._held, b""
        if held:
            self._transport.write(held)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def abort(self) -> None:
        self._held = b""
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + len(self._held)

    # The rest is the transport's own.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._transport.get_write_buffer_limits()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._transport.get_protocol()

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
