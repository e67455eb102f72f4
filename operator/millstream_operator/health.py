"""One small HTTP server: /healthz, /readyz and /metrics.

kopf's own liveness endpoint is not used: it serves one path, and a probe handler that raises anything but a
PermanentError is retried after a minute while the prober waits. Here a check that raises answers 503 at once. The
answers are for machines and for a person with curl: `ok`, or one sentence per problem.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from millstream_operator.metrics import CONTENT_TYPE

log = logging.getLogger(__name__)
Check = Callable[[], Sequence[str]]
SHUTDOWN_SECONDS = 1.0
EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 - the kubelet asks from outside


@dataclass(frozen=True, slots=True)
class HealthServer:
    """`alive` and `ready` give the problems, none when all is well; `metrics` gives the text for Prometheus."""

    alive: Check
    ready: Check
    metrics: Callable[[], bytes]

    async def start(self, port: int, host: str = EVERY_ADDRESS) -> web.AppRunner:
        """Listen, and return the runner, whose `cleanup()` ends it. Port 0: any free one. Raises OSError if taken.

        EVERY_ADDRESS is every one of both families, where the kernel has both: the kubelet asks at the pod's first one.
        """
        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", partial(_answer, self.alive)),
                web.get("/readyz", partial(_answer, self.ready)),
                web.get("/metrics", self._metrics),
            ]
        )
        runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
        await runner.setup()
        if host == EVERY_ADDRESS and socket.has_dualstack_ipv6():
            with suppress(OSError):  # IPv6 may be compiled in and switched off; a port that is taken is refused below
                await web.SockSite(runner, _dual_stack_listener(port)).start()
                return runner
        await web.TCPSite(runner, host, port).start()
        return runner

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.metrics(), headers={"Content-Type": CONTENT_TYPE})


def _dual_stack_listener(port: int) -> socket.socket:
    return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)


async def _answer(check: Check, _: web.Request) -> web.Response:
    try:
        problems = check()
    except Exception as error:
        log.exception("a health check failed")
        problems = [f"the check itself failed: {type(error).__name__}"]
    return web.Response(status=503 if problems else 200, text="\n".join(problems or ["ok"]) + "\n")
