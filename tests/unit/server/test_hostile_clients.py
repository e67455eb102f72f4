"""A sample of the clients of `python -m benchmarks.hostile_clients`: no place is lost, others are served."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from millstream_runtime.server.http.connection_limits import ConnectionLimits
from tests.support.hostile_clients import Misdeed, hostile_crowd, visit_all
from tests.support.server_thread import PATIENCE_SECONDS, serving, wait_for
from tests.support.slow_steps import SlowSteps

CLIENTS = 40
SHORT_SECONDS = 1.0
BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_hostile_clients_leave_nothing_behind_and_others_are_served(tiny_model: Path) -> None:
    limits = ConnectionLimits(head_seconds=SHORT_SECONDS, body_seconds=SHORT_SECONDS, write_seconds=3 * SHORT_SECONDS)
    clients = hostile_crowd(3, CLIENTS, arrive_within_seconds=1.0, patience_seconds=2.0, most_tokens=60)
    for client in clients:  # what is asserted of these below comes in the end, however busy the machine is
        if client.must_be_served or client.misdeed is Misdeed.NO_HTTP:
            client.patience_seconds = PATIENCE_SECONDS
    next(one for one in clients if one.misdeed is Misdeed.HALF_BODY).patience_seconds = PATIENCE_SECONDS
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make, max_num_seqs=8, limits_of_connections=limits) as server:
        server.wait_ready()
        before = server.post("/v1/completions", BODY).json()["choices"]
        port = int(server.url.rsplit(":", 1)[1])
        storm = threading.Thread(target=lambda: asyncio.run(visit_all(clients, port, "tiny")))
        storm.start()
        ready = []
        while storm.is_alive():
            ready.append(server.get("/ready").status_code)
            assert server.post("/v1/completions", BODY).json()["choices"] == before
        storm.join()
        assert set(ready) == {200}
        service = server.server.service
        wait_for(lambda: service.admission.in_flight == service.admission.undelivered == 0, "every place to be free")
        wait_for(lambda: service.connections.num_busy == service.connections.num_waiting == 0, "the connections")
        wait_for(lambda: slow.engine.stats().kv_blocks_used == 0, "every KV block to be free")
        slow.engine.check_integrity()  # type: ignore[attr-defined]
    for client in clients:
        assert client.outcome == "served" or not client.must_be_served, client
    outcomes = {kind: {client.outcome for client in clients if client.misdeed is kind} for kind in Misdeed}
    assert outcomes[Misdeed.NO_HTTP] == {"closed"}
    assert "closed" in outcomes[Misdeed.HALF_HEAD] | outcomes[Misdeed.HALF_BODY] | outcomes[Misdeed.SILENT]
