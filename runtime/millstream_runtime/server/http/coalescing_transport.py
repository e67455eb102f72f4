"""A transport that sends the header of a response in one write with the body that follows it.

uvicorn writes header and body separately: two system calls, two packets, and a client that wakes twice.

    write(header)                    held back
    write(body)                      header + body, in one write
    next iteration of the loop       header alone: a stream whose first token is still to come

Only a header is held back, and only until the end of the current iteration of the event loop. Pieces of a stream are
sent when they are written. A large piece follows the header in a write of its own, uncopied. What is held back is a few
hundred bytes, so the transport's flow control stays practically exact.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable
from typing import Any

MAX_COALESCED_BYTES = 64 << 10  # copying less than this costs less than a second write


class CoalescingTransport(asyncio.Transport):
    """Wraps the transport of one connection; holds back the first write, and the first one after `expect_header`."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        on_backlog: Callable[[], None],
        puts_off_closing: Callable[[], bool],
    ) -> None:
        """`on_backlog`: called after a write of which a part waits for the client to read. `puts_off_closing`: called
        by `close`; True: it is closed later."""
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._on_backlog = on_backlog
        self._puts_off_closing = puts_off_closing
        self._written_bytes = 0
        self._held = b""
        self._expects_header = True

    def expect_header(self) -> None:
        """Expect a new response: the previous one is complete."""
        self.flush()
        self._expects_header = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._held and len(data) <= MAX_COALESCED_BYTES:
            held, self._held = self._held, b""
            self._write(b"".join((held, data)))
        elif self._expects_header:
            self._expects_header = False
            self._held = bytes(data)
            self._loop.call_soon(self.flush)
        else:
            self.flush()
            self._write(data)

    def flush(self) -> None:
        """Send what is held back."""
        held, self._held = self._held, b""
        if held:
            self._write(held)

    @property
    def sent_bytes(self) -> int:
        """What the client's machine has taken so far: it grows while the client reads.

        What this machine's kernel has taken says less: it takes nothing more until a third of its buffer, which may be
        megabytes, is free.
        """
        return self._written_bytes - self._transport.get_write_buffer_size() - _unacknowledged_bytes(self._transport)

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        self._written_bytes += len(data)
        self._transport.write(data)
        if self._transport.get_write_buffer_size():
            self._on_backlog()

    def close(self) -> None:
        self.flush()
        if not self._puts_off_closing():
            self._transport.close()

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def abort(self) -> None:
        self._held = b""
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + len(self._held)

    # The rest delegates to the wrapped transport.

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


def _unacknowledged_bytes(transport: asyncio.Transport) -> int:
    """What this machine's kernel keeps of a connection, because the client's has not acknowledged it yet."""
    link = transport.get_extra_info("socket")
    try:
        return int(struct.unpack("i", fcntl.ioctl(link.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
    except (AttributeError, OSError, ValueError):  # no socket, or a closed one
        return 0
