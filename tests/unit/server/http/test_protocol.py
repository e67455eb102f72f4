"""What comes outside a body is capped too: headers without end, and trailers behind a chunked body."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import pytest

from millstream_runtime.server.http.connection_limits import ConnectionLimits
from millstream_runtime.server.http.protocol import MAX_HEAD_BYTES, MAX_READ_BYTES, CappedHttpProtocol
from tests.support.server_thread import ServerThread

TEXT = "/v1/completions"
BODY = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2, "temperature": 0, "ignore_eos": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
MOST_SENT_BYTES = 64 << 20  # far more than any buffer on the way holds


def sent_until_closed(server: ServerThread, beginning: bytes, endless: bytes) -> tuple[int, bytes]:
    """Bytes that went out before the server closed, and what it had answered."""
    address = urlsplit(server.url)
    assert address.hostname is not None
    assert address.port is not None
    with socket.create_connection((address.hostname, address.port), timeout=60) as link:
        link.sendall(beginning)
        sent, answer = len(beginning), b""
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < MOST_SENT_BYTES:
                link.sendall(endless)
                sent += len(endless)
        with suppress(ConnectionResetError):  # the answer was lost with what the server never read
            answer = link.recv(65536)
        return sent, answer


@pytest.mark.parametrize(
    ("beginning", "endless"),
    [
        (HEAD + b"X-Long: ", b"x" * 65536),
        (HEAD, b"X-One: of many\r\n" * 4096),
        (b"GET /", b"x" * 65536),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"X-Trailer: of many\r\n" * 4096),
    ],
    ids=["one-header", "many-headers", "request-line", "trailers"],
)
def test_what_never_ends_is_cut_off(server: ServerThread, beginning: bytes, endless: bytes) -> None:
    sent, answer = sent_until_closed(server, beginning, endless)
    assert sent < MOST_SENT_BYTES
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert server.get("/health").status_code == 200


def test_a_read_is_small_so_that_what_is_costly_to_parse_takes_short_turns(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one byte, and requests without a body, cost far more per byte than others."""
    receive, sizes = CappedHttpProtocol.data_received, []

    def watched(protocol: CappedHttpProtocol, data: bytes) -> None:
        sizes.append(len(data))
        receive(protocol, data)

    monkeypatch.setattr(CappedHttpProtocol, "data_received", watched)
    body = b'{"model": "tiny", "prompt": "hi", "max_tokens": 1, "user": "' + b"x" * 200_000 + b'"}'
    answer = httpx.post(
        server.url + "/v1/completions", content=body, headers={"Content-Type": "application/json"}, timeout=60
    )
    assert answer.status_code == 200
    assert max(sizes) <= MAX_READ_BYTES


def test_headers_up_to_the_cap_and_bodies_in_small_chunks_are_served(server: ServerThread) -> None:
    def chunks() -> Iterator[bytes]:
        yield from (BODY[start : start + 3] for start in range(0, len(BODY), 3))

    headers = {"Content-Type": "application/json", "X-Long": "x" * (MAX_HEAD_BYTES - 4096)}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(3):  # on one connection: each request is counted alone
            assert client.post(TEXT, content=BODY, headers=headers).status_code == 200
            assert client.post(TEXT, content=chunks(), headers=headers).status_code == 200


def test_a_head_above_the_cap_is_refused_although_it_ends_in_its_last_read(server: ServerThread) -> None:
    """The cap was checked before a read alone, so that up to two more reads passed."""
    for length in (MAX_HEAD_BYTES, MAX_HEAD_BYTES + MAX_READ_BYTES):
        request = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * length + b"\r\n\r\n"
        answer = raw_answer(server, request)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"more than 65536 bytes of headers" in answer


@pytest.mark.parametrize("codings", [b"gzip, chunked", b"gzip\r\nTransfer-Encoding: chunked"])
def test_a_transfer_coding_that_would_not_be_decoded_is_refused_by_name(server: ServerThread, codings: bytes) -> None:
    """It was read as if it were not coded, and its JSON called invalid."""
    body = b"2\r\n{}\r\n0\r\n\r\n"
    answer = raw_answer(server, HEAD + b"Transfer-Encoding: " + codings + b"\r\n\r\n" + body)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"transfer coding other than 'chunked'" in answer
    plain = HEAD + b"Transfer-Encoding: Chunked\r\nConnection: close\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    assert raw_answer(server, plain).startswith(b"HTTP/1.1 200 ")


def test_an_old_connection_ends_after_a_whole_answer_and_says_so(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that pool connections would never send anything to a new pod."""
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY)
    streamed = json.dumps(json.loads(BODY) | {"stream": True, "max_tokens": 8}).encode()
    stream = HEAD + b"Content-Length: %d\r\n\r\n" % len(streamed)
    for ages, wanted in (((0.0, 0.0), 1), ((60.0, 120.0), 2)):
        monkeypatch.setattr(ConnectionLimits, "age_seconds", lambda _, ages=ages: ages[1])
        with httpx.Client(base_url=server.url, timeout=60) as client:
            answers = [client.post(TEXT, content=BODY, headers={"Content-Type": "application/json"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        closes = [answer.headers.get("connection") == "close" for answer in answers]
        assert closes == [wanted == 1] * 2
    monkeypatch.setattr(ConnectionLimits, "age_seconds", lambda _: 0.0)
    for content in (request + BODY, stream + streamed):
        answer = raw_answer(server, content)  # to the end of the connection
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close\r\n" in answer
        assert answer.endswith((b"}", b"0\r\n\r\n")), "the answer is whole"
    both = raw_answer(server, (request + BODY) * 2)
    assert both.count(b"HTTP/1.1 200 ") == 2, "a request that was sent behind another is answered, too"


def test_the_age_of_a_connection_is_bounded_and_spread() -> None:
    limits = ConnectionLimits()
    ages = {limits.age_seconds() for _ in range(200)}
    assert limits.least_age_seconds <= min(ages) < max(ages) <= limits.most_age_seconds
    assert len(ages) > 100


def test_a_connection_that_was_reset_leaves_nothing_behind(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its timer of 75 s for the next request kept it in memory: megabytes, where many clients do that."""
    lost: list[CappedHttpProtocol] = []
    connection_lost = CappedHttpProtocol.connection_lost

    def watched(protocol: CappedHttpProtocol, exc: Exception | None) -> None:
        connection_lost(protocol, exc)
        lost.append(protocol)

    monkeypatch.setattr(CappedHttpProtocol, "connection_lost", watched)
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as link:
        link.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
        assert link.recv(65536).startswith(b"HTTP/1.1 200 ")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    while not lost:
        server.get("/health")
    assert lost[0].timeout_keep_alive_task is None


def raw_answer(server: ServerThread, request: bytes) -> bytes:
    """What comes until the server closes the connection."""
    address = urlsplit(server.url)
    answer = b""
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as link:
        link.sendall(request)
        with suppress(ConnectionResetError):  # what it did not read
            while piece := link.recv(65536):
                answer += piece
    return answer


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_request_that_asks_for_another_protocol_keeps_its_body(server: ServerThread, pieces: int) -> None:
    """Java's HTTP client asks for HTTP/2 in its first request; the parser dropped the body of such a request."""
    wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
    request = HEAD + wish + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    chunked = HEAD + wish + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    probe = b"GET /version HTTP/1.1\r\nHost: a\r\n" + wish + b"\r\n"
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as link:
        for sent, times in ((request, 1), (chunked, 1), (probe, 1), (request * 3, 3)):
            size = -(-len(sent) // pieces)
            for start in range(0, len(sent), size):
                link.sendall(sent[start : start + size])
                time.sleep(0.02)  # so that they come in several pieces
            received = b""
            while received.count(b'"prompt_tokens"') + received.count(b'"version"') < times:
                piece = link.recv(65536)
                assert piece
                received += piece
            assert received.count(b"HTTP/1.1 200 ") == times, received


@pytest.mark.parametrize("stream", [False, True])
def test_an_http_1_0_client_gets_no_chunks(server: ServerThread, stream: bool) -> None:
    """It does not know them, nor interim responses: the end of a stream is the end of the connection."""
    body = json.dumps({**json.loads(BODY), "stream": stream}).encode()
    fields = b"Content-Type: application/json\r\nContent-Length: %d\r\nConnection: keep-alive\r\n" % len(body)
    fields += b"Expect: 100-continue\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=60) as link:
        link.sendall(b"POST /v1/completions HTTP/1.0\r\n" + fields + b"\r\n" + body)
        received = b""
        while piece := link.recv(1 << 16):
            received += piece
    head, _, content = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    if stream:
        assert content.startswith(b"data: {")
        assert content.endswith(b"\n\ndata: [DONE]\n\n")
    else:
        assert json.loads(content)["usage"]["completion_tokens"] == 2
