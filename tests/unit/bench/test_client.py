"""The HTTP and SSE the client has to understand, from a scripted endpoint on a real socket."""

from __future__ import annotations

import pytest

from millstream.bench.client import Endpoint, HttpClient, RequestFailed, SseParser
from millstream_runtime.errors import InvalidConfigError
from tests.support.scripted_server import OK, scripted

SSE = OK + b"Content-Type: text/event-stream\r\n"


async def events(client: HttpClient) -> list[str]:
    return [data async for data in client.post_sse("/v1/completions", {"x": 1})]


async def test_a_chunked_stream_is_read_whatever_its_boundaries() -> None:
    body = b"8;name=1\r\ndata: {}\r\n4\r\n\n\n: \r\nA\r\nhi\n\ndata: \r\n4\r\n\xc3\xa4\n\n\r\n0\r\nTrailer: 1\r\n\r\n"
    async with scripted(SSE + b"Transfer-Encoding: chunked\r\n\r\n" + body) as (client, seen):
        assert await events(client) == ["{}", "ä"]
    assert seen[0].startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert seen[0].endswith(b'{"x": 1}')


async def test_counted_and_unbounded_bodies_are_read_too() -> None:
    async with scripted(OK + b"content-length: 7\r\n\r\n[1,2,3]") as (client, _):
        assert await client.get_json("/v1/models") == [1, 2, 3]
    async with scripted(OK + b"\r\n[4]", close=True) as (client, _):
        assert await client.get_json("/v1/models") == [4]


async def test_a_connection_is_used_again_and_replaced_when_the_server_has_closed_it() -> None:
    one = OK + b"Content-Length: 1\r\n\r\n1"
    async with scripted(one, one) as (client, seen):
        await client.get_json("/a")
        kept = client._idle[0]
        await client.get_json("/b")
        assert client._idle == [kept]
        assert len(seen) == 2
    async with scripted(one, one, close=True) as (client, seen):
        await client.get_json("/a")
        assert await client.get_json("/b") == 1
        assert len(seen) == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", "The endpoint answered 401."),
        (
            b'HTTP/1.1 429 Busy\r\nContent-Length: 41\r\n\r\n{"error": {"message": "queue\\n is  full."}}'[:-1] + b"}",
            "The endpoint answered 429",
        ),
        (SSE + b"Content-Length: 20\r\n\r\ndata: 1\n\n", "closed before the answer was complete"),
        (SSE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "broke"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "does not speak HTTP/1.1"),
        (OK + b"Content-Length: 2\r\n\r\n{}", "did not answer with a stream"),
    ],
)
async def test_a_bad_answer_is_one_sentence(answer: bytes, said: str) -> None:
    async with scripted(answer, close=True) as (client, _):
        with pytest.raises(RequestFailed) as caught:
            await events(client)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_server_that_says_nothing_is_given_up_after_the_timeout() -> None:
    async with scripted(b"", b"") as (client, _):
        client.timeout_seconds = 0.05
        with pytest.raises(RequestFailed, match=r"no whole answer in 0\.05 s"):
            await events(client)


async def test_the_key_is_sent_and_never_said() -> None:
    async with scripted(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n") as (client, seen):
        client.api_key = "sk-secret"
        with pytest.raises(RequestFailed) as caught:
            await client.get_json("/v1/models")
    assert b"Authorization: Bearer sk-secret\r\n" in seen[0]
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("cut", range(1, 12))
def test_sse_events_survive_any_cut(cut: int) -> None:
    text = b": ping\r\n\r\nevent: x\r\ndata: a\r\ndata:b\r\n\r\ndata: \xe2\x82\xac\n\nid: 3\n\n"
    parser = SseParser()
    pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
    assert [data for piece in pieces for data in parser.feed(piece)] == ["a\nb", "€"]


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://h/api/v1", "https://h:443/api"),
        ("http://[::1]:8/", "http://[::1]:8"),
    ],
)
def test_a_url_may_end_in_v1_or_not(url: str, base: str) -> None:
    assert str(Endpoint.parse(url)) == base


@pytest.mark.parametrize(
    "url", ["h:1", "ftp://h", "http://", "http://u:p@h", "http://h:x", "http://h?k=1", "http://h/a b"]
)
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfigError, match="--url"):
        Endpoint.parse(url)
