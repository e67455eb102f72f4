"""Messages over a Unix socket: four bytes of length, then msgpack. Blocking; one reader and one writer an end."""

from __future__ import annotations

import socket
from typing import Generic, TypeVar

import msgspec

LENGTH_BYTES = 4
# A step of 2^20 tokens is 5 MiB; whatever claims more did not come from the other end.
MAX_MESSAGE_BYTES = 256 << 20

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class Channel(Generic[Sent, Received]):
    """One end of a socket pair."""

    def __init__(self, link: socket.socket, received: object) -> None:
        """`received`: the type of what arrives, a union of tagged structs."""
        self._link = link
        self._stream = link.makefile("rb")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)
        self._buffer = bytearray()

    def send(self, message: Sent) -> None:
        """Raises OSError: the other end is closed."""
        self._encoder.encode_into(message, self._buffer, LENGTH_BYTES)
        self._buffer[:LENGTH_BYTES] = (len(self._buffer) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big")
        self._link.sendall(self._buffer)

    def receive(self) -> Received | None:
        """The next message; None at the end of the stream.

        Raises:
            ValueError: it is none (msgspec's own errors are ValueErrors).
        """
        header = self._read(LENGTH_BYTES)
        if header is None:
            return None
        length = int.from_bytes(header, "big")
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message claims {length} bytes; at most {MAX_MESSAGE_BYTES} are sent")
        body = self._read(length)
        return None if body is None else self._decoder.decode(body)

    def close(self) -> None:
        self._stream.close()
        self._link.close()

    def _read(self, count: int) -> bytes | None:
        try:
            data = self._stream.read(count)
        except (OSError, ValueError):  # reset by the other end, or closed by this one
            return None
        return data if len(data) == count else None
