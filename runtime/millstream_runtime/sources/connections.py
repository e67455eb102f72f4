"""Connections of downloads: made to the address that was checked, for urllib.

    Request ──▶ resolve the host once ──▶ addresses that `AllowedHubs` admits ──▶ connect to one of them

So no second answer of a resolver decides where a connection leads, and each redirect is checked, because it is a
connection too. A proxy resolves names by itself: behind one, only an address in the URL is checked, and the proxy's
own.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import urllib.request
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

from millstream_runtime.sources.allowed_hubs import (
    CLOSED_TO_PROXIES,
    CLOSED_TO_SERVERS,
    Address,
    AllowedHubs,
    Network,
)


class ClosedAddressError(OSError):
    """All addresses of a server are closed to downloads."""


class HTTPHandler(urllib.request.HTTPHandler):
    """Requests without TLS."""

    def __init__(self, allowed: AllowedHubs) -> None:
        super().__init__()
        self._allowed = allowed

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        factory = partial(_connection, http.client.HTTPConnection, self._allowed, req, has_proxy=req.has_proxy())
        return self.do_open(factory, req)


class HTTPSHandler(urllib.request.HTTPSHandler):
    """Requests with TLS, for the host of the URL, whatever its address is."""

    def __init__(self, allowed: AllowedHubs, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._allowed, self._tls = allowed, context

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        tls = partial(http.client.HTTPSConnection, context=self._tls)
        has_proxy = getattr(req, "_tunnel_host", None) is not None
        return self.do_open(partial(_connection, tls, self._allowed, req, has_proxy=has_proxy), req)


def _connection(
    kind: Any, allowed: AllowedHubs, request: urllib.request.Request, host: str, *, has_proxy: bool, **named: Any
) -> Any:
    """Make urllib's connection, which is not open yet, with our way to open it. `host`: of the proxy, if any."""
    if has_proxy:
        _require_open(allowed, unquote(urlsplit(request.full_url).hostname or ""))
    connection = kind(host, **named)
    closed = CLOSED_TO_PROXIES if has_proxy else CLOSED_TO_SERVERS
    connection._create_connection = partial(_connect, allowed, closed)
    return connection


def _connect(
    allowed: AllowedHubs, closed: Sequence[Network], server: tuple[str, int], timeout: Any, *_: object
) -> socket.socket:
    """Try each admitted address in the resolver's order: in place of `socket.create_connection`."""
    host, port = server
    error: OSError = ClosedAddressError()
    for family, kind, protocol, _name, address in socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM):
        if not allowed.admits(host, ipaddress.ip_address(address[0]), closed):
            continue
        try:
            return _opened(socket.socket(family, kind, protocol), address, timeout)
        except OSError as failure:
            error = failure
    raise error


def _opened(connection: socket.socket, address: Any, timeout: Any) -> socket.socket:
    try:
        connection.settimeout(timeout)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def _require_open(allowed: AllowedHubs, host: str) -> None:
    """Check a host that a proxy will resolve, if it is an address in any spelling."""
    literal = _literal(host)
    if literal is not None and not allowed.admits(host, literal, CLOSED_TO_SERVERS):
        raise ClosedAddressError


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))  # 127.1, 0x7f000001, 2130706433
    except (OSError, ValueError):
        return None
