"""The addresses at which the runtime and the operator answer: of both families, where the kernel has both."""

from __future__ import annotations

import errno
import socket
from typing import Any

import httpx
import pytest

from millstream_operator.health import HealthServer
from millstream_runtime.errors import InvalidConfigError, RuntimeFailure
from millstream_runtime.server.http.sockets import bind

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the kernel has no IPv6")
IPV4, IPV6 = "127.0.0.1", "::1"
EVERY_IPV4 = "0.0.0.0"  # noqa: S104 - as the operator renders it


def families(host: str) -> set[str]:
    """The loopback addresses at which a listener on `host` is reached."""
    with bind(host, 0) as listener:
        port, reached = listener.getsockname()[1], set()
        for address in (IPV4, IPV6):
            try:
                socket.create_connection((address, port), 5).close()
            except OSError:
                continue
            reached.add(address)
        return reached


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "reached"), [(EVERY_IPV4, {IPV4, IPV6}), ("::", {IPV4, IPV6}), (IPV4, {IPV4}), (IPV6, {IPV6})]
)
def test_every_address_is_one_of_both_families(host: str, reached: set[str]) -> None:
    assert families(host) == reached


@needs_ipv6
def test_a_port_that_is_taken_on_either_family_is_refused() -> None:
    for host in (IPV4, IPV6):
        with bind(host, 0) as taken, pytest.raises(RuntimeFailure, match="is in use by another process"):
            bind(EVERY_IPV4, taken.getsockname()[1])


@pytest.mark.parametrize("lacks", [errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT])
def test_where_ipv6_is_switched_off_ipv4_is_listened_on(lacks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    create_server = socket.create_server

    def without_ipv6(address: tuple[str, int], *, family: int = socket.AF_INET, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(lacks, "no IPv6")
        return create_server(address, family=family, **options)

    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: True)
    monkeypatch.setattr(socket, "create_server", without_ipv6)
    assert families(EVERY_IPV4) == {IPV4}
    with pytest.raises(InvalidConfigError, match="--host :: is not an address of this machine"):
        bind("::", 0)


@needs_ipv6
async def test_the_operators_probes_are_answered_on_both_families() -> None:
    runner = await HealthServer(list, list, lambda: b"").start(0)
    try:
        port = runner.addresses[0][1]
        async with httpx.AsyncClient(trust_env=False) as client:
            for host in (IPV4, f"[{IPV6}]"):
                assert (await client.get(f"http://{host}:{port}/healthz")).text == "ok\n"
    finally:
        await runner.cleanup()
