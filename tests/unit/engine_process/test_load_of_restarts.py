"""`/load` across the end of an engine: what is known of its prefix cache ends with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.support.engine_processes import serving_from_a_process
from tests.support.server_thread import PATIENCE_SECONDS, wait_for

pytestmark = pytest.mark.deep

BODY = {"model": "tiny", "prompt": [*range(40)], "max_tokens": 1}


def test_a_new_engine_is_a_new_boot_with_no_answers_and_an_empty_cache(tiny_model: Path) -> None:
    with serving_from_a_process(tiny_model, restart_delays_seconds=(0.0,)) as (server, engines):
        server.wait_ready()

        def ask(request_id: str) -> None:
            headers = {"X-Request-Id": request_id}
            answer = httpx.post(server.url + "/v1/completions", json=BODY, headers=headers, timeout=PATIENCE_SECONDS)
            assert answer.status_code == 200

        ask("a")
        ask("b")
        before = server.get("/load").json()
        assert [one["cached_tokens"] for one in before["answers"]] == [0, 32]
        os.kill(engines.launched[0].pid, signal.SIGKILL)
        wait_for(lambda: len(engines.launched) == 2, "the restart")
        starting = server.get(f"/load?since={before['cursor']}").json()
        assert starting["boot_id"] != before["boot_id"]
        assert starting["answers"] == []
        if starting["phase"] != "Ready":  # the new engine imports torch: this is its first second
            assert starting["requests"] is starting["tokens"] is starting["kv"] is None
        server.wait_ready()
        ask("c")
        after = server.get(f"/load?since={before['cursor']}").json()
        assert after["boot_id"] == starting["boot_id"]
        assert [one["cached_tokens"] for one in after["answers"]] == [0]
        assert (after["missed"], after["requests"]) == (0, {"queued": 0, "running": 0})
