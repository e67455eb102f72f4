"""An HTTP client for downloads: redirects leak no credential, retries obey Retry-After, errors say what failed.

    open(url) ── 30x ──▶ next address (never https -> http, never another scheme)
              ── 401 ──▶ the Auth answers the challenge once
              ── 408, 429, 5xx, lost ──▶ `Retry`: exponential backoff, or what Retry-After asks for

Only HTTP handlers are installed, so a redirect to `file:` or `ftp:` fails; they connect to no loopback, link-local or
metadata address (`allowed_hubs.py`). No message has an address, or what a server
or a proxy wrote: they name the server as `NamedServer` does.
"""

from __future__ import annotations

import email.utils
import http.client
import os
import re
import secrets
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urljoin

from millstream_runtime import __version__
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.sources.addresses import NamedServer, origin
from millstream_runtime.sources.allowed_hubs import CHART_VALUE, VARIABLE, read_allowed_hubs
from millstream_runtime.sources.connections import ClosedAddressError, HTTPHandler, HTTPSHandler

MAX_REDIRECTS = 8
ERROR_BODY_LIMIT_BYTES = 2048
RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
REDIRECTS = frozenset({301, 302, 303, 307, 308})
BAD_ADDRESS = "its address, or that of a proxy (HTTPS_PROXY, HTTP_PROXY), is not like http://host:port"
_PROXY_REFUSAL = re.compile(r"Tunnel connection failed: (\d{3})\b")


class Auth(Protocol):
    """Credentials for one origin."""

    def header(self, url: str) -> str | None:
        """The Authorization header for `url`; None for other origins."""

    def challenged(self, url: str, challenge: str) -> bool:
        """A 401 came with this WWW-Authenticate. True: there is a new credential, retry."""


class NoAuth:
    """No credentials."""

    def header(self, url: str) -> str | None:
        return None

    def challenged(self, url: str, challenge: str) -> bool:
        return False


class BearerAuth:
    """A fixed token for one origin."""

    def __init__(self, token: str, url: str) -> None:
        self._token = token
        self._origin = origin(url)

    def header(self, url: str) -> str | None:
        return f"Bearer {self._token}" if origin(url) == self._origin else None

    def challenged(self, url: str, challenge: str) -> bool:
        return False


class TransferError(Exception):
    """A request failed. `retryable`: the same request may work later."""

    retryable = True
    retry_after_seconds: float | None = None
    status: int | None = None


class ConnectionLost(TransferError):
    """No response, or an incomplete one. `server`: its name in messages."""

    def __init__(self, server: str, detail: str, *, retryable: bool = True) -> None:
        super().__init__(f"{server} does not answer: {detail}")
        self.retryable = retryable


class AddressRefused(TransferError):
    """The server is where downloads do not go; it was not asked. `server`: its name in messages."""

    retryable = False

    def __init__(self, server: str) -> None:
        super().__init__(
            f"{server} has a loopback, link-local or metadata address, where downloads do not go unless the chart "
            f"value {CHART_VALUE} (${VARIABLE} of a command) has its name or its range"
        )


class HTTPStatus(TransferError):
    """An error response. `server`: its name in messages."""

    status: int

    def __init__(self, server: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(f"{server} answered HTTP {status}")
        self.status = status
        self.headers = headers
        self.body = body
        self.retryable = status in RETRYABLE
        self.retry_after_seconds = parse_retry_after(headers.get("retry-after"), time.time())


def _say_nothing(line: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retries of one piece of work. Waits double from `first_wait_seconds`; progress resets them. `say`: shows one
    line before each wait."""

    attempts: int = 6
    first_wait_seconds: float = 1.0
    longest_wait_seconds: float = 30.0
    longest_retry_after_seconds: float = 600.0  # a longer Retry-After is an error: the next pod retries
    timeout_seconds: float = 30.0  # without a byte
    sleep: Callable[[float], None] = time.sleep
    say: Callable[[str], None] = _say_nothing


class Retry:
    """Counts the consecutive failures of one piece of work."""

    def __init__(self, policy: RetryPolicy, say: Callable[[str], None] | None = None) -> None:
        """`say`: in place of the policy's."""
        self._policy = policy
        self._say = say or policy.say
        self.failures = 0

    def progressed(self) -> None:
        self.failures = 0

    def wait_or_raise(self, error: TransferError) -> None:
        """Sleep before the next attempt; raise `error` if there is none."""
        self.failures += 1
        asked = error.retry_after_seconds
        too_long = asked is not None and asked > self._policy.longest_retry_after_seconds
        if not error.retryable or self.failures >= self._policy.attempts or too_long:
            raise error
        backoff = min(self._policy.first_wait_seconds * 2 ** (self.failures - 1), self._policy.longest_wait_seconds)
        # Jitter keeps pods that were refused together from retrying together.
        jittered = backoff * (0.5 + secrets.randbelow(1000) / 2000)
        seconds = jittered if asked is None else asked + jittered
        self._say(f"{error}; attempt {self.failures + 1} of {self._policy.attempts} in {seconds:.0f} s")
        self._policy.sleep(seconds)


class Response:
    """Status, headers (names in lower case) and a body that is read in pieces. `server`: its name in messages."""

    def __init__(self, server: str, raw: http.client.HTTPResponse) -> None:
        self.server = server
        self.status = raw.status
        self.headers = {key.lower(): value for key, value in raw.getheaders()}
        self._raw = raw

    def read(self, size_bytes: int) -> bytes:
        """Read what is available, up to `size_bytes`; empty at the end. Raises ConnectionLost."""
        try:
            # Not `read`: it waits for all of it, and drops what came if the rest does not.
            return self._raw.read1(size_bytes)
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionLost(self.server, _words(error)) from None

    def close(self) -> None:
        self._raw.close()


class Client:
    """GET requests with one credential and one retry policy. Thread-safe. Proxies and what an administrator admits
    beyond public and private addresses are read from the environment.

    Raises:
        InvalidConfigError: MILLSTREAM_ALLOWED_HUBS has an entry that is none.
    """

    def __init__(self, server: NamedServer, auth: Auth | None = None, policy: RetryPolicy | None = None) -> None:
        self.server = server
        self.auth: Auth = auth or NoAuth()
        self.policy = policy or RetryPolicy()
        allowed = read_allowed_hubs(os.environ)
        self._opener = urllib.request.OpenerDirector()
        tls = HTTPSHandler(allowed, ssl.create_default_context())
        for handler in (urllib.request.ProxyHandler(), HTTPHandler(allowed), tls):
            self._opener.add_handler(handler)

    @contextmanager
    def open(self, url: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Iterator[Response]:
        """Send one request; follow redirects, do not retry.

        Raises:
            HTTPStatus, ConnectionLost, AddressRefused: see `retryable`.
        """
        response = self._follow(url, dict(headers or {}), method)
        try:
            yield response
        finally:
            response.close()

    def get(self, url: str, limit_bytes: int, headers: Mapping[str, str] | None = None) -> tuple[bytes, Response]:
        """Get a small body, with retries, and its response.

        Raises:
            TransferError: after the last attempt.
            RuntimeFailure: DownloadFailed, the body is longer than `limit_bytes`.
        """
        retry = Retry(self.policy)
        while True:
            try:
                with self.open(url, headers) as response:
                    body = read_up_to(response, limit_bytes + 1)
            except TransferError as error:
                retry.wait_or_raise(error)
                continue
            if len(body) > limit_bytes:
                raise RuntimeFailure(
                    FailureReason.DOWNLOAD_FAILED,
                    f"{self.server.name_of(url)} sends more than the {limit_bytes} bytes allowed.",
                )
            return body, response

    def head(self, url: str) -> Response:
        """The headers before any redirect to another host. Raises TransferError after the last attempt."""
        retry = Retry(self.policy)
        while True:
            try:
                with self.open(url, method="HEAD") as response:
                    return response
            except TransferError as error:
                retry.wait_or_raise(error)

    def _follow(self, url: str, headers: dict[str, str], method: str) -> Response:
        challenged = False
        start = origin(url)
        for _ in range(MAX_REDIRECTS):
            response = self._send(url, headers, method)
            location = response.headers.get("location", "")
            if response.status in REDIRECTS and location:
                target = self._redirect_target(url, location)
                if method == "HEAD" and origin(target) != start:
                    return response  # the hub's headers describe the file; the CDN's have less
                response.close()
                url = target
                continue
            if response.status == 401 and not challenged:
                challenged = True
                if self.auth.challenged(url, response.headers.get("www-authenticate", "")):
                    response.close()
                    continue
            if response.status >= 300:
                with_body = response.read(ERROR_BODY_LIMIT_BYTES) if method == "GET" else b""
                response.close()
                raise HTTPStatus(response.server, response.status, response.headers, with_body)
            return response
        raise ConnectionLost(self.server.name, f"more than {MAX_REDIRECTS} redirects", retryable=False)

    def _send(self, url: str, headers: dict[str, str], method: str) -> Response:
        server = self.server.name_of(url)
        try:
            request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310 - only HTTP handlers are installed
            request.add_header("User-Agent", f"millstream/{__version__}")
            if (credential := self.auth.header(url)) is not None:
                request.add_unredirected_header("Authorization", credential)
            raw = self._opener.open(request, timeout=self.policy.timeout_seconds)
        except ClosedAddressError:
            raise AddressRefused(server) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ClosedAddressError):
                raise AddressRefused(server) from None
            if isinstance(error.reason, str):  # urllib's own: no host, or a proxy of a scheme that it has not
                raise ConnectionLost(server, BAD_ADDRESS, retryable=False) from None
            bad_certificate = isinstance(error.reason, ssl.SSLCertVerificationError)
            raise ConnectionLost(server, _words(error.reason), retryable=not bad_certificate) from None
        except (http.client.InvalidURL, ValueError):
            raise ConnectionLost(server, BAD_ADDRESS, retryable=False) from None
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionLost(server, _words(error)) from None
        assert isinstance(raw, http.client.HTTPResponse)  # noqa: S101 - no other handler is installed
        return Response(server, raw)

    def _redirect_target(self, url: str, location: str) -> str:
        """The target of a redirect. Raises ConnectionLost: not a URL, or a downgrade from https."""
        server = self.server.name_of(url)
        try:
            target = urljoin(url, location)
            here, there = origin(url)[0], origin(target)[0]
        except ValueError:
            raise ConnectionLost(server, "it redirects to something that is not a URL", retryable=False) from None
        if there == "https" or here == there == "http":
            return target
        raise ConnectionLost(server, "it redirects to an address that is not https", retryable=False)


def read_up_to(response: Response, limit_bytes: int) -> bytes:
    """The body, or its first `limit_bytes`. Raises ConnectionLost when it ends before its Content-Length."""
    parts, total_bytes = [], 0
    while total_bytes < limit_bytes and (part := response.read(min(1 << 20, limit_bytes - total_bytes))):
        parts.append(part)
        total_bytes += len(part)
    promised = response.headers.get("content-length", "")
    if promised.isdecimal() and total_bytes < min(int(promised), limit_bytes):
        raise ConnectionLost(response.server, f"the answer ended after {total_bytes} of {promised} bytes")
    return b"".join(parts)


def parse_retry_after(value: str | None, now_seconds: float) -> float | None:
    """Seconds from a Retry-After header, which holds seconds or an HTTP date (RFC 9110, 10.2.3)."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now_seconds)
    except ValueError:
        return None


def _words(error: object) -> str:
    """What went wrong, in words of the operating system, OpenSSL's or ours: none of an address or of an answer."""
    if isinstance(error, TimeoutError):
        return "it timed out"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message.partition(',')[0]}"  # behind it: the host
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or type(error).__name__})"
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved"
    if isinstance(error, http.client.RemoteDisconnected):
        return "it closed the connection without an answer"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if (refusal := _PROXY_REFUSAL.match(str(error))) is not None:
        return f"the proxy answered HTTP {refusal[1]}"
    if isinstance(error, http.client.HTTPException):
        return f"its answer is not HTTP ({type(error).__name__})"
    return f"the connection failed ({type(error).__name__})"
