"""A small HTTP/1.1 client on asyncio streams: JSON in, JSON or server-sent events out, connections kept alive.

`httpx` and `aiohttp` are not dependencies of the runtime, and a benchmark needs little code between the socket and its
clock. An OpenAI endpoint needs one request at a time per connection, chunked or counted bodies, and TLS. Not supported:
redirects, proxies, compression, HTTP/2.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from millstream_runtime.errors import InvalidConfigError

MAX_ANSWER_BYTES = 8 << 20  # of an answer read whole, and of one server-sent event
READ_BYTES = 1 << 16
CONNECT_TIMEOUT_SECONDS = 10.0


class RequestFailed(Exception):
    """A request failed; `str()` is a sentence. `status` is None where no response arrived."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an OpenAI API is. `base_path` ends before `/v1`."""

    scheme: str
    host: str
    port: int
    base_path: str

    @staticmethod
    def parse(url: str) -> Endpoint:
        """`http://127.0.0.1:8000`, with or without a path and `/v1`.

        Raises:
            InvalidConfigError: not an http(s) URL, or one that carries a password.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise InvalidConfigError(f"--url is {url!r}; its host or port cannot be read.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidConfigError(f"--url is {url!r}; it must be like http://127.0.0.1:8000.")
        if parts.username is not None or parts.query or parts.fragment:
            raise InvalidConfigError("--url must have no user, query or fragment; a key comes from $OPENAI_API_KEY.")
        if any(not " " < character < "\x7f" for character in parts.path):
            raise InvalidConfigError(f"--url is {url!r}; its path must be plain ASCII without spaces.")
        default_port = 443 if parts.scheme == "https" else 80
        base_path = parts.path.rstrip("/").removesuffix("/v1")
        return Endpoint(parts.scheme, parts.hostname, port if port is not None else default_port, base_path)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.base_path}"

    @property
    def authority(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return self.host == "localhost" or self.host.startswith("127.") or self.host == "::1"


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = False

    @property
    def open(self) -> bool:
        return not (self.writer.is_closing() or self.reader.at_eof())


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    body: AsyncGenerator[bytes, None]


@dataclass(slots=True)
class HttpClient:
    """Requests to one endpoint, any number at a time. The key, if there is one, is sent and never shown."""

    endpoint: Endpoint
    api_key: str | None = None
    timeout_seconds: float = 600.0
    _idle: list[_Connection] = field(default_factory=list)

    async def get_json(self, path: str) -> Any:
        """The body of a GET.

        Raises:
            RequestFailed: no answer, an answer other than 200, or one that is not JSON.
        """
        async with self._exchange("GET", path, None) as answer:
            body = await _whole(answer)
        try:
            return json.loads(body)
        except ValueError:
            raise RequestFailed(f"{self.endpoint}{path} did not answer with JSON.", answer.status) from None

    async def post_sse(self, path: str, body: dict[str, Any]) -> AsyncIterator[str]:
        """The `data` of each server-sent event of a POST's answer, as it arrives.

        Raises:
            RequestFailed: as for `get_json`, also in the middle of the stream.
        """
        parser = SseParser()
        async with self._exchange("POST", path, body) as answer:
            if "text/event-stream" not in answer.headers.get("content-type", ""):
                raise RequestFailed(f"{self.endpoint}{path} did not answer with a stream.", answer.status)
            async for piece in answer.body:
                for data in parser.feed(piece):
                    yield data

    async def close(self) -> None:
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[_Answer]:
        """One request; the connection goes back for reuse only when its answer was read to the end."""
        connection: _Connection | None = None
        reusable = False
        try:
            async with asyncio.timeout(self.timeout_seconds):
                connection, answer = await self._send(method, path, body)
                async with aclosing(answer.body):
                    if answer.status != 200:
                        raise RequestFailed(_refusal(answer.status, await _whole(answer)), answer.status)
                    yield answer
                    reusable = await anext(answer.body, None) is None and _keeps_alive(answer)
        except TimeoutError:
            raise RequestFailed(f"{self.endpoint} gave no whole answer in {self.timeout_seconds:g} s.") from None
        except (OSError, EOFError, ValueError) as error:  # EOFError: IncompleteReadError; ValueError: overlong lines
            raise RequestFailed(f"The connection to {self.endpoint} broke: {_plain(error)}.") from None
        finally:
            if connection is not None:
                if reusable:
                    self._idle.append(connection)
                else:
                    connection.writer.close()

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[_Connection, _Answer]:
        """Write the request, read the head. A kept connection may have been closed meanwhile: then a new one."""
        request = self._request_bytes(method, path, body)
        while True:
            connection = await self._connection()
            again = connection.used
            connection.used = True
            try:
                connection.writer.write(request)
                await connection.writer.drain()
                status, headers = await _read_head(connection.reader)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                connection.writer.close()
                if again and not getattr(error, "partial", b""):
                    continue
                raise
            except BaseException:
                connection.writer.close()
                raise
            return connection, _Answer(status, headers, _body(connection.reader, status, headers))

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
            connection.writer.close()
        tls = ssl.create_default_context() if self.endpoint.scheme == "https" else None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                streams = await asyncio.open_connection(self.endpoint.host, self.endpoint.port, ssl=tls)
        except TimeoutError:
            raise RequestFailed(f"{self.endpoint} does not take connections.") from None
        except OSError as error:
            raise RequestFailed(f"No server answers at {self.endpoint}: {_plain(error)}.") from None
        return _Connection(*streams)

    def _request_bytes(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        lines = [
            f"{method} {self.endpoint.base_path}{path} HTTP/1.1",
            f"Host: {self.endpoint.authority}",
            "Accept: application/json, text/event-stream",
            "User-Agent: millstream-bench",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        payload = b""
        if body is not None:
            payload = json.dumps(body).encode()
            lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + payload


class SseParser:
    """Bytes to the `data` of server-sent events (WHATWG HTML, "Server-sent events"). Comments and names are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """Events that `piece` completes.

        Raises:
            ValueError: an event of more than `MAX_ANSWER_BYTES`.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_ANSWER_BYTES:
            raise ValueError("an event is too long")
        events = []
        for line in (raw.removesuffix(b"\r") for raw in lines):
            if not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
        return events


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers; interim answers (1xx) are skipped."""
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = head.rstrip("\r\n").split("\r\n")
        version, _, rest = status_line.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise ValueError("it does not speak HTTP/1.1")
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if not rest.startswith("1"):
            return int(rest[:3]), {**headers, ":version": version}


async def _body(reader: asyncio.StreamReader, status: int, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
    """The body, piece by piece as it arrives: chunked, counted, or until the other side closes."""
    if status in (204, 304):
        return
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readline()).partition(b";")[0], 16):
            async for piece in _exactly(reader, size):
                yield piece
            await reader.readexactly(2)
        while await reader.readline() not in (b"\r\n", b""):
            pass  # trailers
    elif "content-length" in headers:
        async for piece in _exactly(reader, int(headers["content-length"])):
            yield piece
    else:
        while piece := await reader.read(READ_BYTES):
            yield piece


async def _exactly(reader: asyncio.StreamReader, count: int) -> AsyncIterator[bytes]:
    while count > 0:
        piece = await reader.read(min(count, READ_BYTES))
        if not piece:
            raise asyncio.IncompleteReadError(b"", count)
        count -= len(piece)
        yield piece


async def _whole(answer: _Answer) -> bytes:
    body = b""
    async for piece in answer.body:
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError("the answer is too long")
    return body


def _keeps_alive(answer: _Answer) -> bool:
    counted = "content-length" in answer.headers or "transfer-encoding" in answer.headers
    asked = answer.headers.get("connection", "").lower()
    return counted and answer.headers[":version"] != "HTTP/1.0" and asked != "close"


def _refusal(status: int, body: bytes) -> str:
    """A sentence from an OpenAI error object, or from the status alone."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = ""
    text = " ".join(str(message).split())[:300]
    return f"The endpoint answered {status}: {text}" if text else f"The endpoint answered {status}."


def _plain(error: BaseException) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "it was closed before the answer was complete"
    if isinstance(error, ConnectionRefusedError):  # asyncio's own words are "Connect call failed ('127.0.0.1', 8000)"
        return "the connection was refused"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.strip().rstrip(".")
