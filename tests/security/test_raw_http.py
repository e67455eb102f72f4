"""Requests that no HTTP library sends, on plain sockets: each is refused, none is answered twice, others are served.

What follows a request whose length two readers could understand differently must not be read as a request: behind a
proxy it would be answered to another client (request smuggling, RFC 9112, section 11.2).
"""

from __future__ import annotations

import json
import re
import socket
from contextlib import suppress

import pytest

from tests.support.raw_clients import connected, require_service, to_the_end
from tests.support.server_thread import ServerThread

BODY = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 1}).encode()
NEXT = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
ANSWER = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


def post(*headers: bytes, body: bytes = BODY, target: bytes = b"/v1/completions") -> bytes:
    head = [b"POST " + target + b" HTTP/1.1", b"Host: x", b"Content-Type: application/json", *headers]
    return b"\r\n".join([*head, b"", body])


def get(target: bytes = b"/version", *headers: bytes, method: bytes = b"GET", version: bytes = b"HTTP/1.1") -> bytes:
    return b"\r\n".join([method + b" " + target + b" " + version, b"Host: x", *headers, b"", b""])


def length(value: bytes | int) -> bytes:
    return b"Content-Length: " + (str(value).encode() if isinstance(value, int) else value)


CHUNKED = b"Transfer-Encoding: chunked"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
EMPTY = b"0\r\n\r\n"

# Two readers could disagree about where these end.
AMBIGUOUS: dict[str, bytes] = {
    "a length and chunks": post(length(len(EMPTY)), CHUNKED, body=EMPTY),
    "chunks and a length": post(CHUNKED, length(len(EMPTY) + len(NEXT)), body=EMPTY),
    "two lengths": post(length(len(BODY)), length(len(BODY) + len(NEXT))),
    "two lengths in one header": post(length(b"%d, %d" % (len(BODY), len(BODY) + len(NEXT)))),
    "a length with a sign": post(length(b"+%d" % len(BODY))),
    "a negative length": post(length(-1)),
    "a length in hexadecimal": post(length(b"0x%x" % len(BODY))),
    "a length with an underscore": post(length(b"1_0"), body=b"x" * 10),
    "a length that is no number": post(length(b"many")),
    "a length of nothing": post(length(b"")),
    "a length beyond 64 bits": post(length(b"9" * 30)),
    "a space before the colon": post(b"Content-Length : %d" % len(BODY)),
    "a folded header": post(b"X-Long: a", b" Content-Length: 3"),
    "another coding than chunks": post(b"Transfer-Encoding: xchunked", body=CHUNKS),
    "chunks that are not last": post(b"Transfer-Encoding: chunked, identity", body=CHUNKS),
    "chunks behind a control character": post(b"Transfer-Encoding: \x0bchunked", body=CHUNKS),
    "a chunk of negative size": post(CHUNKED, body=b"-1\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a chunk size with a prefix": post(CHUNKED, body=b"0x5\r\nabcde\r\n0\r\n\r\n"),
    "a chunk size beyond 64 bits": post(CHUNKED, body=b"10000000000000005\r\nabcde\r\n0\r\n\r\n"),
    "a chunk that is longer than its size": post(CHUNKED, body=b"1\r\nabcde\r\n0\r\n\r\n"),
}
BAD: dict[str, bytes] = {
    "a zero byte in a header": get(b"/version", b"X-A: a\0b"),
    "a carriage return in a header": get(b"/version", b"X-A: a\rX-B: b"),
    "a header without a colon": get(b"/version", b"nothing"),
    "a header without a name": get(b"/version", b": value"),
    "a header with a space in its name": get(b"/version", b"X A: a"),
    "a space before the first header": b"GET /version HTTP/1.1\r\n Host: x\r\n\r\n",
    "a version that does not exist": get(version=b"HTTP/9.9"),
    "the beginning of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
    "a method of other characters": get(method=b"G\x00T"),
    "a tunnel": get(b"127.0.0.1:22", method=b"CONNECT"),
    "a request to another host": get(b"http://127.0.0.1:1/latest/meta-data"),
    "a path to a file": get(b"/../../../../etc/passwd"),
    "a path to a file, encoded": get(b"/%2e%2e/%2e%2e/etc/passwd"),
    "a path with a zero byte": get(b"/version%00.json"),
    "a trace": get(method=b"TRACE"),
}


def statuses(server: ServerThread, sent: bytes) -> list[int]:
    """The statuses of all answers to what is sent, until the server ends the connection."""
    link = connected(server)
    with link:
        with suppress(ConnectionResetError, BrokenPipeError):
            link.sendall(sent)
            link.shutdown(socket.SHUT_WR)
        answer = to_the_end(link)
    assert b"root:" not in answer
    return [int(status) for status in ANSWER.findall(answer)]


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_a_request_in_the_body_of_another_is_not_answered(server: ServerThread, case: str) -> None:
    found = statuses(server, AMBIGUOUS[case] + NEXT)
    assert len(found) <= 1, "what follows was read as a request"
    assert all(400 <= status < 500 for status in found), found
    require_service(server)


@pytest.mark.parametrize("case", BAD)
def test_a_request_that_is_none_is_refused(server: ServerThread, case: str) -> None:
    found = statuses(server, BAD[case])
    assert len(found) <= 1
    assert all(400 <= status < 500 for status in found), found
    require_service(server)


def test_a_request_behind_a_good_one_is_answered(server: ServerThread) -> None:
    """The tests above count answers: so they have to see two where there are two."""
    assert statuses(server, post(length(len(BODY))) + NEXT) == [200, 200]
