"""The client under load: workers that never pause do not starve other callers."""

from __future__ import annotations

import asyncio

import kopf
from aiohttp import web

from millstream_operator.app import WORKERS
from millstream_operator.kube.client import ClusterClient
from millstream_operator.kube.kinds import SERVICE

FAIR_REQUESTS = 20 * WORKERS


async def test_workers_that_never_pause_do_not_starve_a_listing() -> None:
    """aiohttp gives a free connection to the first caller: with no more of them than workers, only these get one."""
    answered, busy = 0, asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal answered
        answered += 1
        if answered == 2 * WORKERS:
            busy.set()
        await asyncio.sleep(0.001)
        return web.json_response({"items": [], "metadata": {"resourceVersion": "1"}})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    client = ClusterClient(lambda: kopf.ConnectionInfo(server=f"http://{host}:{port}"))

    async def work() -> None:
        while True:
            await client.get(SERVICE, "team", "demo")

    workers = [asyncio.create_task(work()) for _ in range(WORKERS)]
    try:
        await busy.wait()
        before = answered
        await client.list(SERVICE, None, None)
        assert answered - before < FAIR_REQUESTS
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await client.close()
        await runner.cleanup()
