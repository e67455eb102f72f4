"""uvicorn's protocol on httptools (llhttp, in C), with what they lack: a cap on headers, time limits for the client
(`connection_limits`), a cap on connections (`connection_table`), one packet for a short answer
(`coalescing_transport`), an answer that can be read while the body still comes, and a callback on disconnect
(`disconnect`).

Neither llhttp nor uvicorn limits headers: an endless header, thousands of headers, or trailers behind a chunked body
would fill the memory of the process before any route saw the request.

    received bytes - bytes of the body = request line, headers, chunk sizes, trailers ≤ MAX_HEAD_BYTES + the chunks' own

That is checked before each read is parsed, and a head again once it is complete, which may be in its last read.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

from httptools import HttpParserUpgrade
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from millstream_runtime.server.http.api_errors import ApiError, from_status, too_many_connections, unavailable
from millstream_runtime.server.http.api_keys import OPEN_PATHS
from millstream_runtime.server.http.coalescing_transport import CoalescingTransport
from millstream_runtime.server.http.connection_age import last_on_connection
from millstream_runtime.server.http.connection_table import CloseReason, ConnectionTable
from millstream_runtime.server.http.deadline import Deadline
from millstream_runtime.server.http.disconnect import EXTENSION, DisconnectSignal
from millstream_runtime.server.http.failure_log import log_failure
from millstream_runtime.server.http.half_close import INTERIM_RESPONSE, HalfClosed
from millstream_runtime.server.http.middleware import REQUEST_ID_HEADER, RequestHeaders, request_id_of
from millstream_runtime.server.http.unchunked import without_chunks

MAX_HEAD_BYTES = 64 << 10  # h11's, so what was accepted before still is
# A read is parsed in one turn of the event loop: in chunks of one byte, asyncio's 256 KiB took 0.2 s.
MAX_READ_BYTES = 16 << 10
TOO_LONG = f"The request has more than {MAX_HEAD_BYTES} bytes of headers."
LINE_OVERHEAD = 4  # of a header: a colon, a space, the end of the line
CHUNK_OVERHEAD = 8  # a chunk of one byte has five more of framing; no well-behaved client sends many of those


class _Awaits(Enum):
    """What the client is to send next."""

    FIRST_BYTE = auto()  # of a new connection
    HEAD = auto()
    BODY = auto()
    NOTHING = auto()  # its request is complete; uvicorn limits the time until the next


class _HeadRefused(Exception):
    """A head that is HTTP and is not served; ends the parser, which answers with `send_400_response`."""


class CappedHttpProtocol(HttpToolsProtocol):
    """Answers 400 to more than the cap outside a body, 408 to a request that does not come; closes the connection."""

    transport: CoalescingTransport

    def __init__(self, *args: Any, table: ConnectionTable, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = table
        self._limits = table.limits
        self._head_bytes = 0
        self._body_bytes = 0
        self._head_problem = ""  # why a complete head is not served
        self._awaits = _Awaits.FIRST_BYTE
        self._body_since_seconds = 0.0
        self._read_deadline = Deadline(self.loop, self._on_read_deadline)
        self._write_deadline = Deadline(self.loop, self._on_write_deadline)
        self._sent_bytes = 0  # when the write deadline was set
        self._closes_after_body = False
        self._dropped_bytes = 0  # of a body that comes after its answer
        self._piece = self._again = b""  # what is parsed now, and what of it is to be parsed again
        self._answering: RequestResponseCycle | None = None  # the request that is answered, or was the last one
        self._half_closed: HalfClosed | None = None  # the client has ended its side
        self._last_error: ApiError | None = None  # the answer to what came behind the requests that are answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = MAX_READ_BYTES  # type: ignore[attr-defined]  # of asyncio's transports for sockets
        self.transport = CoalescingTransport(transport, self.loop, self._on_backlog, self._lingers)
        self._disconnect_signal = DisconnectSignal(self.flow.resume_reading)
        self._read_deadline.set(self._limits.head_seconds)
        self._ends_at_seconds = self.loop.time() + self._limits.age_seconds()
        self._table.add(self)

    def data_received(self, data: bytes) -> None:
        if self._closes_after_body:
            self._drop(len(data))
            return
        if self._head_bytes > MAX_HEAD_BYTES + CHUNK_OVERHEAD * self._body_bytes:
            self.send_400_response(TOO_LONG)
            return
        self._head_bytes += len(data)
        if self._awaits is _Awaits.FIRST_BYTE:
            self._awaits = _Awaits.HEAD
        elif self._awaits is _Awaits.NOTHING:
            self._await_head()
        while data:
            self._piece, self._again = data, b""
            super().data_received(data)
            data = self._again

    def on_message_begin(self) -> None:
        # The rest of the piece that begins the message is not counted: at most one read of the socket.
        self._head_bytes = self._body_bytes = self._dropped_bytes = 0
        if self._awaits is _Awaits.NOTHING:  # behind another request in the same piece
            self._await_head()
        self._unset_keepalive_if_required()  # set by the late end of a body in the same piece
        super().on_message_begin()
        self.scope["extensions"] = {
            EXTENSION: {"disconnect_signal": self._disconnect_signal}
        }  # ASGI: one dict per request

    def on_headers_complete(self) -> None:
        if self._asks_for_upgrade():
            return
        self._head_problem = head_problem(self.url, self.headers)
        if self._head_problem:
            raise _HeadRefused
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # such a client knows no interim responses (RFC 9110, 10.1.1)
        super().on_headers_complete()
        self._awaits = _Awaits.BODY
        self._body_since_seconds = self.loop.time()
        self._read_deadline.set(self._limits.body_seconds)

    def on_body(self, body: bytes) -> None:
        self._head_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)
        if self.cycle.response_complete:
            self._drop(len(body))
            return
        so_far_seconds = self.loop.time() - self._body_since_seconds
        self._read_deadline.set(self._limits.body_seconds_left(so_far_seconds, self._body_bytes))

    def on_message_complete(self) -> None:
        if self._asks_for_upgrade():
            return
        super().on_message_complete()
        self._awaits = _Awaits.NOTHING
        self._read_deadline.clear()
        if not self.cycle.response_complete:
            self._table.request_complete(self)
        elif self.timeout_keep_alive_task is None:  # the end of the body came after the answer and has cancelled it
            handler = self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, handler)

    def _asks_for_upgrade(self) -> bool:
        """Whether the request asks for another protocol, as Java's HTTP client does for HTTP/2. The parser drops its
        body, so it is parsed again without that wish, which a server may ignore. CONNECT has nothing else to say."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _unsupported_upgrade_warning(self) -> None:
        """Called while the exception of the parser is handled; its argument is where the head ends in the piece."""
        error = sys.exc_info()[1]
        if not self._asks_for_upgrade() or not isinstance(error, HttpParserUpgrade):
            return
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        rest = self._piece[error.args[0] :]
        self._again = b"\r\n".join((*lines, b"", rest))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for answers to requests that came whole; what is missing of another will never come."""
        if not self._is_answering():
            return False
        self._drop_half_a_request()
        if self._half_closed is None:
            begun = self._answering is not None and self._answering.response_started
            self._half_closed = HalfClosed(
                self.transport,
                self.loop,
                self._ask,
                self.transport.abort,
                at_once=begun or self._table.num_busy > 1,
            )
        if not self.pipeline and self._answering is not None:
            self._answering.keep_alive = False
        return True

    def _ask(self) -> bool:
        """Write what a client skips, to see whether it is there. False: an HTTP/1.0 client would not skip it."""
        assert self._answering is not None  # noqa: S101 - a request is being answered
        if self._answering.response_started:
            if self._disconnect_signal.keep_alive is not None:
                self._disconnect_signal.keep_alive()
            return True
        if self._answering.scope["http_version"] == "1.0":
            return False
        self.transport.write(INTERIM_RESPONSE)
        self.transport.expect_header()
        return True

    def _drop_half_a_request(self) -> None:
        """Forget a request behind others that has not come whole."""
        self._read_deadline.clear()
        if self._awaits is _Awaits.BODY:
            self.pipeline.popleft()
        self._awaits = _Awaits.NOTHING
        self._closes_after_body = True  # what still comes is dropped

    def _is_answering(self) -> bool:
        """Whether a request that has come whole waits for the end of its answer."""
        if self._awaits is _Awaits.BODY and not self.pipeline:
            return False
        return self._answering is not None and not self._answering.response_complete

    def on_response_complete(self) -> None:
        self.transport.expect_header()
        was_last = not self.pipeline
        super().on_response_complete()
        if was_last and (self._half_closed is not None or self._last_error is not None):
            self._table.answer_complete(self)
            self._end()
            return
        is_half_sent = self._awaits is _Awaits.BODY and not self.pipeline
        if is_half_sent and self.cycle.response_complete:
            self._read_deadline.set(self._limits.linger_seconds)
        elif self._awaits in (_Awaits.HEAD, _Awaits.BODY):  # a request behind it, which is read from now on
            self._read_next_request()
        if self.cycle.response_complete or is_half_sent:
            self._table.answer_complete(self)

    def _read_next_request(self) -> None:
        """Begin the time of a request that came, in part, before the answer to the one before it was complete."""
        is_head = self._awaits is _Awaits.HEAD
        self._body_since_seconds = self.loop.time()
        self._read_deadline.set(self._limits.head_seconds if is_head else self._limits.body_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it after a reset: this object would live on for 75 s
        self._read_deadline.close()
        self._write_deadline.close()
        if self._half_closed is not None:
            self._half_closed.close()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
        self._table.remove(self)
        self._disconnect_signal.notify()

    def shutdown(self) -> None:
        """Called when the server stops: a body that has not come by now is not waited for."""
        if self._awaits is _Awaits.BODY and not self.cycle.response_started and not self.pipeline:
            error = unavailable("The server is shutting down; try again.", "draining")
            log_failure(request_id_of(RequestHeaders.of(dict(self.cycle.scope))), error)
            self._refuse(error)
        else:
            super().shutdown()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        if self.loop.time() >= self._ends_at_seconds:
            app = last_on_connection(app, cycle, self._nothing_follows)
        if cycle.scope["http_version"] == "1.0":
            app = without_chunks(app, cycle)
        if self._table.is_full and cycle.scope["path"] not in OPEN_PATHS:
            self._table.closed[CloseReason.TOO_MANY] += 1
            app = self._too_many(RequestHeaders.of(cycle.scope))
        super()._start_asgi_task(cycle, app)

    def _nothing_follows(self) -> bool:
        """Whether the client has sent nothing behind the request that is answered."""
        return not self.pipeline and self._awaits is _Awaits.NOTHING

    def _too_many(self, headers: RequestHeaders) -> Response:
        error, request_id = too_many_connections(self._limits.max_connections), request_id_of(headers)
        log_failure(request_id, error)
        response = error.response()
        response.headers[REQUEST_ID_HEADER.decode()] = request_id
        return response

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, self._head_problem or msg, code="invalid_http"))

    def close_for_another(self) -> None:
        self.transport.abort()

    def _await_head(self) -> None:
        self._awaits = _Awaits.HEAD
        self._read_deadline.set(self._limits.head_seconds)

    def _on_read_deadline(self) -> None:
        if self.flow.read_paused or self._is_answering():
            self._read_deadline.set(self._limits.body_seconds)  # not the client's fault
            return
        in_head = self._awaits in (_Awaits.FIRST_BYTE, _Awaits.HEAD)
        self._table.closed[CloseReason.HEAD_TIMEOUT if in_head else CloseReason.BODY_TIMEOUT] += 1
        was_refused = self._awaits is _Awaits.BODY and self.cycle.response_started
        if self._awaits is _Awaits.FIRST_BYTE or was_refused:
            self._closes_after_body = True  # it has waited for the body long enough
            self.transport.close()
        else:
            self._refuse(from_status(408))

    def _lingers(self) -> bool:
        """Close later, if the client still sends a body: closing would reset the connection before it has read."""
        if self._awaits is not _Awaits.BODY or self._closes_after_body or self.transport.is_closing():
            return False
        self._closes_after_body = True
        self.transport.write_eof()
        self.flow.resume_reading()
        self._read_deadline.set(self._limits.linger_seconds)
        return True

    def _drop(self, num_bytes: int) -> None:
        self._dropped_bytes += num_bytes
        if self._dropped_bytes > self._limits.linger_bytes:
            self._closes_after_body = True
            self.transport.close()

    def _on_backlog(self) -> None:
        if not self._write_deadline.is_set:
            self._sent_bytes = self.transport.sent_bytes
            self._write_deadline.set(self._limits.write_seconds)

    def _on_write_deadline(self) -> None:
        if not self.transport.get_write_buffer_size():
            return
        if self.transport.sent_bytes > self._sent_bytes:
            self._on_backlog()
            return
        self._table.closed[CloseReason.WRITE_TIMEOUT] += 1
        self.transport.abort()

    def _end(self) -> None:
        """Close: the answers are complete to all requests that came whole."""
        error, self._last_error = self._last_error, None
        if error is not None:
            self._refuse(error)
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer by hand: there is no complete request that the application could answer. Those before it go first."""
        if self._is_answering():
            self._drop_half_a_request()
            self._last_error = error
            return
        body = json.dumps(error.body()).encode()
        fields = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        fields |= {name.lower(): value for name, value in error.headers().items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._closes_after_body = True  # what may still come is not waited for
        self.transport.write(STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body)
        self.transport.close()


def head_problem(url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Why a complete head is not served, as a sentence for the client; empty where it is. Names are in lower case."""
    if len(url) + sum(len(name) + len(value) + LINE_OVERHEAD for name, value in headers) > MAX_HEAD_BYTES:
        return TOO_LONG
    codings = b",".join(value for name, value in headers if name == b"transfer-encoding").lower().split(b",")
    if any(coding.strip() not in (b"chunked", b"") for coding in codings):
        return "The body has a transfer coding other than 'chunked'; send it without."
    return ""
