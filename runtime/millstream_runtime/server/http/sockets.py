"""The listening socket, bound before anything heavy is imported, so that a busy port fails in milliseconds.

`0.0.0.0` and `::` both mean every address of both families, where the kernel has both: a pod's first address may be of
either, and the Service and the kubelet's probes ask at that one.
"""

from __future__ import annotations

import errno
import socket

from millstream_runtime.errors import FailureReason, InvalidConfigError, RuntimeFailure

LISTEN_BACKLOG = 2048
NO_IPV6 = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - what an operator or a user asks for


def bind(host: str, port: int) -> socket.socket:
    """Bind a listening socket.

    Raises:
        RuntimeFailure: the port is taken; InvalidConfigError: the address cannot be used at all.
    """
    try:
        listener = _listener(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"Port {port} on {host} is in use by another process; stop it or choose another with --port."
            raise RuntimeFailure(FailureReason.PORT_IN_USE, message) from error
        if error.errno == errno.EACCES:
            raise InvalidConfigError(f"--port {port} needs root; choose one above 1023.") from error
        raise InvalidConfigError(
            f"--host {host} is not an address of this machine; try 127.0.0.1 or 0.0.0.0."
        ) from error
    # Connections inherit it. asyncio sets it only on sockets that name their protocol, which accepted ones do not.
    # Without it a response in two writes (header, body) waits 40 ms for the client's delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _listener(host: str, port: int) -> socket.socket:
    if host in EVERY_ADDRESS and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=LISTEN_BACKLOG, dualstack_ipv6=True
            )
        except OSError as error:
            # IPv6 may be compiled in and switched off; `::` alone was then asked for in vain.
            if error.errno not in NO_IPV6 or host == "::":
                raise
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
