"""One HTTP request to an address at which any program may answer: bounded in time and size, and never redirected.

The answer is read whole, however it is cut into chunks, up to a limit. A redirect is an answer like any other wrong
one: following it would let a pod send the operator, with the operator's network access, anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import aiohttp

# Without compression the limit holds for what is sent and for what is kept.
_PLAIN = {"Accept": "application/json", "Accept-Encoding": "identity"}


class UnusableAnswer(Exception):
    """No usable HTTP answer came. `str()` says what happened instead, without the address and the request's headers.

    `status`: the HTTP code, where one came that carries no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


async def request_json(
    method: str,
    url: str,
    *,
    timeout_seconds: float,
    limit_bytes: int,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    accepted: Collection[int] = (200,),
) -> dict[str, Any]:
    """Send one request over a connection of its own, and return the JSON object of the answer.

    `timeout_seconds` limits the whole exchange, however slowly the answer arrives. `accepted`: the status codes that
    carry an answer.

    Raises:
        UnusableAnswer: no answer in time, another status, a body beyond `limit_bytes`, or no JSON object.
    """
    return read_json_object(await _request(method, url, timeout_seconds, limit_bytes, body, headers, accepted))


async def request_text(url: str, *, timeout_seconds: float, limit_bytes: int) -> str:
    """GET as `request_json`, and return the answer as text, with U+FFFD for what is not UTF-8.

    Raises:
        UnusableAnswer: no answer in time, another status than 200, or a body beyond `limit_bytes`.
    """
    return (await _request("GET", url, timeout_seconds, limit_bytes)).decode(errors="replace")


async def _request(
    method: str,
    url: str,
    timeout_seconds: float,
    limit_bytes: int,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    accepted: Collection[int] = (200,),
) -> bytes:
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    try:
        async with (
            # A session per request: a kept connection would stay with the same, older pod.
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False, headers=_PLAIN) as session,
            session.request(method, url, json=body, headers=headers, allow_redirects=False) as response,
        ):
            if response.status not in accepted:
                raise UnusableAnswer(f"answered {_words(response.status)}", response.status)
            return await read_up_to(response, limit_bytes)
    except TimeoutError:
        raise UnusableAnswer(f"gave no answer within {timeout_seconds:.0f} seconds") from None
    except aiohttp.ClientPayloadError:
        raise UnusableAnswer("cut its answer off") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise UnusableAnswer(f"could not be asked: {type(error).__name__}") from None


async def read_up_to(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """Read the whole body. Raises UnusableAnswer where it is longer than the limit."""
    read = bytearray()
    async for chunk in response.content.iter_any():
        read += chunk
        if len(read) > limit_bytes:
            raise UnusableAnswer(f"answered more than {limit_bytes >> 10} KiB")
    return bytes(read)


def read_json_object(text: bytes | str) -> dict[str, Any]:
    """Parse the body. Raises UnusableAnswer where it is anything but a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UnusableAnswer("answered something that is not a JSON object")
    return found


def _words(status: int) -> str:
    if 300 <= status < 400:
        return f"HTTP {status}, a redirect, which is not followed"
    if status in (401, 403):
        return f"HTTP {status}: the request was refused for its API key, or for want of one"
    return f"HTTP {status}"
