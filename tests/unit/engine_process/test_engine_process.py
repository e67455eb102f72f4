"""The engine in a process of its own, killed and crashed under load: clients hear of it, and the server goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream_runtime.boot import Phase
from millstream_runtime.engine.host_limits import oom_kills
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.server.engine.subprocess import exit_failure
from tests.support.engine_processes import serving_from_a_process
from tests.support.server_thread import ServerThread, wait_for

pytestmark = pytest.mark.deep

CHAT = "/v1/chat/completions"


def chat_body(**overrides: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1900}
    return {**body, "temperature": 0, "ignore_eos": True, **overrides}


def last_event(server: ServerThread, began: threading.Semaphore) -> dict[str, Any]:
    """Read a stream to whatever end it has."""
    last = ""
    with httpx.stream("POST", server.url + CHAT, json=chat_body(stream=True), timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                last = line.removeprefix("data: ")
                began.release()
    assert last != "[DONE]"
    return dict(json.loads(last))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_engine_is_an_error_at_once_and_another_one_serves(tiny_model: Path) -> None:
    with serving_from_a_process(tiny_model, restart_delays_seconds=(0.0,)) as (server, engines):
        server.wait_ready()
        before = server.post(CHAT, chat_body(max_tokens=20)).json()["choices"][0]["message"]["content"]
        began = threading.Semaphore(0)
        with ThreadPoolExecutor(8) as pool:
            streams = [pool.submit(last_event, server, began) for _ in range(4)]
            wholes = [pool.submit(server.post, CHAT, chat_body()) for _ in range(4)]
            wait_for(lambda: server.server.service.admission.in_flight == 8, "all requests")
            assert all(began.acquire(timeout=60) for _ in range(4))
            os.kill(engines.launched[0].pid, signal.SIGKILL)
            # Long answers of an engine that was killed: every request gets an error.
            assert [stream.result()["error"]["code"] for stream in streams] == ["engine_failed"] * 4
            for whole in wholes:
                assert whole.result().status_code == 503
                assert whole.result().json()["error"]["code"] == "engine_failed"
                assert whole.result().headers["retry-after"] == "1"
        wait_for(lambda: len(engines.launched) == 2, "the restart")
        health, ready = server.get("/health"), server.get("/ready")
        if not ready.json()["ready"]:  # the new engine imports torch: this is its first second
            assert ready.status_code == 503
            assert "SIGKILL" in ready.json()["message"] or ready.json()["phase"] != "Starting"
            assert health.status_code == 200
            assert health.json() == {"status": "restarting", "engine_restarts": 1}
            refused = server.post(CHAT, chat_body(max_tokens=1))
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_failed"
        server.wait_ready()
        assert server.post(CHAT, chat_body(max_tokens=20)).json()["choices"][0]["message"]["content"] == before
        assert server.get("/health").json() == {"status": "ok", "engine_restarts": 1}
        assert server.metric("millstream_engine_restarts_total", model_name="tiny") == 1.0
        assert server.metric("vllm:num_requests_running", model_name="tiny") == 0.0

        os.kill(engines.launched[1].pid, signal.SIGSEGV)  # once more than is allowed here
        server.join()
    assert isinstance(server.failure, RuntimeFailure)
    assert server.failure.reason is FailureReason.RUNTIME_CRASHED
    assert "SIGSEGV" in server.failure.message
    assert "started again once" in server.failure.message
    assert server.ledger.snapshot().phase is Phase.FAILED
    assert not any(is_alive(engine.pid) for engine in engines.launched)


def test_an_engine_that_dies_while_it_loads_ends_the_server_with_the_cause(tiny_model: Path) -> None:
    with serving_from_a_process(tiny_model, restart_delays_seconds=(0.0, 0.0)) as (server, engines):
        wait_for(lambda: bool(engines.launched), "the launch")
        os.kill(engines.launched[0].pid, signal.SIGKILL)
        server.join()
    assert isinstance(server.failure, RuntimeFailure)
    assert "SIGKILL" in server.failure.message
    assert len(engines.launched) == 1


def test_what_the_engine_refuses_to_load_is_told_in_its_own_words(tiny_model: Path) -> None:
    with serving_from_a_process(tiny_model, max_model_len=1 << 20, restart_delays_seconds=(0.0,)) as (server, engines):
        server.join()
    assert isinstance(server.failure, RuntimeFailure)
    assert server.failure.reason is FailureReason.INVALID_CONFIG
    assert "--max-model-len" in server.failure.message
    assert len(engines.launched) == 1


def test_drain_and_disconnects_reach_across_the_border(tiny_model: Path) -> None:
    with serving_from_a_process(tiny_model, heartbeat_interval_seconds=1) as (server, engines):
        server.wait_ready()
        with httpx.stream("POST", server.url + CHAT, json=chat_body(stream=True), timeout=60) as answer:
            next(answer.iter_lines())
        wait_for(lambda: server.metric("vllm:kv_cache_usage_perc", model_name="tiny") == 0.0, "its KV blocks back")
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 1.0
        first = server.metric("millstream_heartbeat_latency_seconds", model_name="tiny")
        beaten = "millstream_heartbeat_latency_seconds"
        wait_for(lambda: server.metric(beaten, model_name="tiny") != first, "a heartbeat")
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(server.post, CHAT, chat_body(max_tokens=300))
            wait_for(lambda: server.server.service.admission.in_flight == 1, "the request")
            server.begin_drain()
            assert whole.result().json()["usage"]["completion_tokens"] == 300
        server.join()
    assert server.failure is None
    assert not is_alive(engines.launched[0].pid)


def test_the_engine_ends_when_the_http_process_is_killed(tiny_model: Path) -> None:
    """Nobody is left to stop it, so the end of the stream does; in a pod it would hold the accelerator."""
    program = (
        "import sys, time\n"
        "from millstream_runtime.config import *\n"
        "from millstream_runtime.server.engine.subprocess import EngineProcessLauncher\n"
        "engines = EngineProcessLauncher(RuntimeConfig(model=sys.argv[1], served_model_name='t', device=Device.CPU))\n"
        "engines.prepare()\n"
        "print(engines._prepared.process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(tiny_model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine_pid = int(parent.stdout.readline())
        assert is_alive(engine_pid)
        parent.kill()
    wait_for(lambda: not is_alive(engine_pid) or is_zombie(engine_pid), "the engine to end")


def is_zombie(pid: int) -> bool:
    """A process that has ended and is not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_http_process_needs_no_torch(tiny_model: Path) -> None:
    program = (
        "import sys, millstream.commands.serve, millstream_runtime.server.model_server\n"
        "import millstream_runtime.tokenizing.tokenizer\n"
        "import millstream_runtime.server.engine.subprocess\n"
        "millstream_runtime.tokenizing.tokenizer.Tokenizer.from_folder(__import__('pathlib').Path(sys.argv[1]))\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'safetensors') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(tiny_model)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("code", "out_of_memory", "reason", "named"),
    [
        (-signal.SIGKILL, True, FailureReason.OUT_OF_MEMORY, "memory limit"),
        (-signal.SIGKILL, False, FailureReason.RUNTIME_CRASHED, "SIGKILL"),
        (-signal.SIGABRT, True, FailureReason.RUNTIME_CRASHED, "SIGABRT"),
        (-signal.SIGBUS, False, FailureReason.RUNTIME_CRASHED, "SIGBUS (often because a model's file was cut"),
        (-40, False, FailureReason.RUNTIME_CRASHED, "was killed by signal 40."),
        (3, False, FailureReason.RUNTIME_CRASHED, "exit code 3"),
    ],
)
def test_the_cause_of_an_exit_is_reported(code: int, out_of_memory: bool, reason: FailureReason, named: str) -> None:
    death = exit_failure(code, out_of_memory=out_of_memory)
    assert death.reason is reason
    assert named in death.message


@pytest.mark.quick
def test_kills_for_want_of_memory_are_read_from_either_cgroup_version(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) == 0
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert oom_kills(tmp_path) == 2
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 4\noom_kill 3\n")
    assert oom_kills(tmp_path) == 3
