"""A remote file as a forward reader that can skip parts without downloading them. For `inspect`.

A short skip reads on, since the bytes are in flight already; a long one drops the connection and requests a later
range. So the headers of an uncompressed tar with 140 GB of weights cost a few requests, not 140 GB.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from millstream_runtime.sources.client import Client, ConnectionLost, Response, Retry, TransferError
from millstream_runtime.sources.transfer import RemoteFile

READ_ON_BYTES = 4 << 20


class RemoteReader:
    """Forward reading and seeking in `file`. A context manager.

    Raises:
        TransferError: from `read`, after the last attempt.
    """

    def __init__(self, client: Client, file: RemoteFile, window_bytes: int | None = None) -> None:
        """`window_bytes`: how much one request asks for, at least; None for all that follows."""
        self._client = client
        self._file = file
        self._window_bytes = window_bytes
        self._until = 0  # end of the open response
        self._position = 0
        self._skip_bytes = 0  # bytes of the open response to discard
        self._response: Response | None = None
        self._stack = ExitStack()
        self._retry = Retry(client.policy)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        """Forwards, or backwards by a new request; costs nothing until the next read."""
        ahead = position - self._position
        if self._response is not None and 0 <= ahead <= READ_ON_BYTES and position <= self._until:
            self._skip_bytes += ahead
        elif ahead:
            self._drop()
        self._position = position
        return position

    def read(self, size: int, /) -> bytes:
        """`size` bytes, fewer only at the end of the file."""
        wanted = min(size, self._file.size_bytes - self._position)
        parts: list[bytes] = []
        while wanted > 0:
            try:
                data = self._read_some(wanted)
            except TransferError as error:
                self._drop()
                self._retry.wait_or_raise(error)
                continue
            self._retry.progressed()
            parts.append(data)
            self._position += len(data)
            wanted -= len(data)
        return b"".join(parts)

    def _read_some(self, wanted: int) -> bytes:
        if self._response is not None and self._position >= self._until:
            self._drop()
        if self._response is None:
            self._response = self._open(wanted)
        while self._skip_bytes:
            self._skip_bytes -= len(self._some(self._response, min(self._skip_bytes, 1 << 20)))
        return self._some(self._response, min(wanted, self._until - self._position))

    def _open(self, wanted: int) -> Response:
        size_bytes, start = self._file.size_bytes, self._position
        end = size_bytes if self._window_bytes is None else min(size_bytes, start + max(self._window_bytes, wanted))
        ranged = start > 0 or end < size_bytes
        asked = {"Range": f"bytes={start}-{end - 1}"} if ranged else {}
        response = self._stack.enter_context(self._client.open(self._file.url, asked))
        if response.status == 206 and not response.headers.get("content-range", "").startswith(f"bytes {start}-"):
            raise ConnectionLost(response.server, "it answered another range than was asked for", retryable=False)
        self._until = end if response.status == 206 else size_bytes
        self._skip_bytes = 0 if response.status == 206 else start  # the server has no ranges: read and discard
        return response

    def _some(self, response: Response, size: int) -> bytes:
        data = response.read(size)
        if not data:
            raise ConnectionLost(response.server, f"cut after {self._position} of {self._file.size_bytes} bytes")
        return data

    def _drop(self) -> None:
        self._stack.close()
        self._response = None
        self._skip_bytes = 0
