"""The holder of one key cannot keep the holders of others out, however much and however urgently it asks."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.support.server_thread import PATIENCE_SECONDS, serving, wait_for
from tests.support.slow_steps import SlowSteps

ROWS = 2
PLACES = ROWS + 64
LONG_SECONDS = 5 * PATIENCE_SECONDS  # the flood's one answer comes at the end


def test_a_key_that_floods_the_server_keeps_no_other_key_out(tiny_model: Path, tmp_path: Path) -> None:
    """It fills the batch and the queue with long answers of the highest priority; another key asks for a short one."""
    file = tmp_path / "keys"
    file.write_text("key-flood\nkey-other\nkey-other\n")  # a key that is written twice has no second share
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make, max_num_seqs=ROWS, api_keys_file=str(file)) as server:
        server.wait_ready()
        admission = server.server.service.admission

        def ask(key: str, answers: int, **fields: Any) -> httpx.Response:
            body = {"model": "tiny", "prompt": [1, 2, 3], "n": answers, "ignore_eos": True, **fields}
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=LONG_SECONDS)

        def longest_wait(key: str) -> float:
            name = hashlib.sha256(key.encode()).hexdigest()[:8]
            return server.metric("millstream_longest_wait_seconds", key=name)

        slow.gate.clear()
        with ThreadPoolExecutor(2) as pool:
            flood = pool.submit(ask, "key-flood", PLACES, max_tokens=8, priority=-100)
            wait_for(lambda: admission.in_flight == PLACES, "the queue to fill")
            assert ask("key-flood", 1, max_tokens=1).json()["error"]["code"] == "queue_full"
            assert ask("key-other", PLACES // 2 + 1, max_tokens=1).status_code == 429, "more than its share"
            other = pool.submit(ask, "key-other", 1, max_tokens=2, priority=100)
            wait_for(lambda: admission.in_flight == PLACES + 1, "the other key's request")
            wait_for(lambda: longest_wait("key-flood") > 0 and longest_wait("key-other") > 0, "both to be submitted")
            slow.steps_left = 4 * 8  # the flood needs PLACES / ROWS * 8
            slow.gate.set()
            assert other.result(LONG_SECONDS).status_code == 200
            assert not flood.done()
            assert longest_wait("key-flood") > 0
            assert longest_wait("key-other") == 0
            slow.steps_left = None
            slow.gate.set()
            assert len(flood.result(LONG_SECONDS).json()["choices"]) == PLACES
        assert admission.in_flight == 0
        file.write_text("key-other\n")  # the flood's key is revoked: it has no series any more
        wait_for(lambda: ask("key-flood", 1, max_tokens=1).status_code == 401, "the file to be read again")
        assert hashlib.sha256(b"key-flood").hexdigest()[:8] not in server.get("/metrics").text
