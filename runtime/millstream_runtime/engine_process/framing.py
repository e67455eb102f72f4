"""Messages on a byte stream: four bytes of length, big-endian, then the payload. Pure: bytes in, payloads out."""

from __future__ import annotations

from collections.abc import Iterator

HEADER_BYTES = 4
# The largest message is the log-probabilities of a whole prompt: a million tokens with twenty alternatives each.
MAX_PAYLOAD_BYTES = 1 << 30


class FramingError(Exception):
    """The stream is not what this module wrote."""


def frame(payload: bytes) -> bytes:
    """Return the payload with its length in front.

    Raises:
        FramingError: it is longer than MAX_PAYLOAD_BYTES.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FramingError(f"a message of {len(payload)} bytes is longer than {MAX_PAYLOAD_BYTES}")
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class FrameReader:
    """Reassembles messages from a stream that arrives in arbitrary pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the payloads that are complete now. Exhaust the iterator before the next call.

        Raises:
            FramingError: a length above MAX_PAYLOAD_BYTES.
        """
        whole: bytes | bytearray = piece
        if self._buffer:
            self._buffer += piece
            whole = self._buffer
        start = 0
        while len(whole) - start >= HEADER_BYTES:
            body = start + HEADER_BYTES
            length = int.from_bytes(whole[start:body], "big")
            if length > MAX_PAYLOAD_BYTES:
                raise FramingError(f"a message claims {length} bytes; at most {MAX_PAYLOAD_BYTES} are sent")
            if len(whole) - body < length:
                break
            yield bytes(whole[body : body + length])
            start = body + length
        if whole is piece:  # most pieces are one message, which then never sees the buffer
            self._buffer += piece[start:]
        else:
            del self._buffer[:start]
