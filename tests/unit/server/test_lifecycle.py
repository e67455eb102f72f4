"""Boot, disconnects, a full queue and a dying engine: what happens around the requests."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from millstream_runtime.boot import Phase
from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine_process.loop import EngineLike, OnPhase, load_engine
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.server.http import limits
from tests.support.chat_streams import CHAT, chat_body, events_of, in_background
from tests.support.server_thread import serving, wait_for
from tests.support.slow_steps import SlowSteps


def test_before_ready_the_server_answers_with_its_phase(tiny_model: Path) -> None:
    load = threading.Event()

    def wait_then_load(config: RuntimeConfig, on_phase: OnPhase) -> EngineLike:
        on_phase("LoadingWeights", "Reading.")
        load.wait(60)
        return load_engine(config, on_phase)

    with serving(tiny_model, make_engine=wait_then_load) as server:
        wait_for(lambda: server.ledger.snapshot().phase is Phase.LOADING_WEIGHTS, "the load to begin")
        ready = server.get("/ready")
        assert (ready.status_code, ready.json()["phase"], ready.json()["ready"]) == (503, "LoadingWeights", False)
        assert server.get("/health").status_code == 200
        assert server.get("/v1/models").json()["data"][0]["max_model_len"] is None
        assert server.metric("millstream_ready", model_name="tiny") == 0.0
        early = server.post(CHAT, chat_body())
        assert early.status_code == 503
        assert early.headers["retry-after"] == "1"
        assert early.json()["error"]["code"] == "model_loading"
        load.set()
        server.wait_ready()
        assert server.get("/ready").status_code == 200
        assert server.metric("millstream_ready", model_name="tiny") == 1.0
        assert server.metric("millstream_boot_phase_seconds", phase="WarmingUp") > 0.0


def test_a_server_that_is_stopped_while_it_loads_just_stops(tiny_model: Path) -> None:
    load = threading.Event()

    def wait_then_load(config: RuntimeConfig, on_phase: OnPhase) -> EngineLike:
        load.wait(60)
        return load_engine(config, on_phase)

    with serving(tiny_model, make_engine=wait_then_load) as server:
        server.begin_drain()
        load.set()
        server.join()
    assert server.failure is None


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_frees_its_place_and_its_kv_blocks(tiny_model: Path, streamed: bool) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make) as server:
        server.wait_ready()
        slow.gate.clear()
        payload = json.dumps(chat_body(max_tokens=1500, stream=streamed)).encode()
        raw = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(payload), payload)
        )
        wait_for(lambda: server.server.service.admission.in_flight == 1, "the request")
        raw.close()
        wait_for(lambda: server.server.service.admission.in_flight == 0, "its place to be free")
        steps_before = slow.engine.stats().steps_total
        slow.gate.set()
        wait_for(lambda: slow.engine.stats().kv_blocks_used == 0, "its KV blocks to be free")
        assert slow.engine.stats().num_requests_running == 0
        assert slow.engine.stats().steps_total <= steps_before + 1  # the step that was under way, and no other
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 1.0
        assert server.post(CHAT, chat_body(max_tokens=2)).status_code == 200


def test_a_stop_string_frees_the_kv_blocks_too(tiny_model: Path) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make) as server:
        server.wait_ready()
        whole = server.post(CHAT, chat_body(max_tokens=40)).json()["choices"][0]["message"]["content"]
        stopped = server.post(CHAT, chat_body(max_tokens=1500, stop=whole[10])).json()["choices"][0]
        assert stopped["finish_reason"] == "stop"
        wait_for(lambda: slow.engine.stats().kv_blocks_used == 0, "its KV blocks to be free")


def test_a_full_queue_is_a_429_and_empties_again(tiny_model: Path) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make, max_num_seqs=2) as server:
        server.wait_ready()
        slow.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            # One request of 64 prompts and two more fill 2 places in the batch and 64 in the queue.
            many = {"model": "tiny", "prompt": ["x"] * 64, "max_tokens": 1}
            first = pool.submit(server.post, "/v1/completions", many)
            wait_for(lambda: server.server.service.admission.in_flight == 64, "the queue to fill")
            refused = server.post("/v1/completions", {**many, "prompt": ["x"] * 3})
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert server.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1.0
            assert server.metric("vllm:admission_rejections_total", reason="max_num_queued_tokens") == 0.0
            slow.gate.set()
            assert len(first.result().json()["choices"]) == 64
        assert server.post("/v1/completions", {**many, "prompt": ["x"] * 3}).status_code == 200


def test_a_dying_engine_tells_every_client_at_once_and_ends_the_process(tiny_model: Path) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make) as server:
        server.wait_ready()
        with events_of(server, chat_body(max_tokens=1500)) as events:
            next(events)
            slow.gate.clear()
            plain = in_background(lambda: server.post(CHAT, chat_body()))
            wait_for(lambda: server.server.service.admission.in_flight == 2, "both requests")
            slow.fail_with = ZeroDivisionError("secret detail")
            slow.gate.set()
            last = json.loads(list(events)[-1])
        assert last["error"]["code"] == "engine_failed"
        answer = plain.result()
        assert answer.status_code == 503
        assert "secret" not in answer.text + str(last)
        server.join()
    assert isinstance(server.failure, RuntimeFailure)
    assert server.failure.reason is FailureReason.RUNTIME_CRASHED
    assert "ZeroDivisionError" in server.failure.message
    assert "secret" not in server.failure.message
    assert server.ledger.snapshot().phase is Phase.FAILED


def test_running_out_of_memory_has_a_reason_of_its_own(tiny_model: Path) -> None:
    slow = SlowSteps()
    slow.fail_with = MemoryError()
    with serving(tiny_model, make_engine=slow.make) as server:
        server.join()
    assert isinstance(server.failure, RuntimeFailure)
    assert server.failure.reason is FailureReason.OUT_OF_MEMORY


def test_a_request_the_engine_refuses_fails_alone(tiny_model: Path) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make) as server:
        server.wait_ready()
        add = slow.engine.add_request

        def refuse_once(_: Any) -> None:
            slow.engine.add_request = add  # type: ignore[method-assign]
            raise ValueError("no")

        slow.engine.add_request = refuse_once  # type: ignore[method-assign, assignment]
        refused = server.post(CHAT, chat_body(max_tokens=2))
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "internal_error")  # nothing restarts
        assert server.post(CHAT, chat_body(max_tokens=2)).status_code == 200


def test_heartbeats_keep_an_idle_engine_warm_and_count_as_nobodys_traffic(tiny_model: Path) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make, heartbeat_interval_seconds=1) as server:
        server.wait_ready()
        warm_up_latency = server.metric("millstream_heartbeat_latency_seconds", model_name="tiny")
        steps_of_warm_up = slow.engine.stats().steps_total
        wait_for(lambda: slow.engine.stats().steps_total >= steps_of_warm_up + 2, "two heartbeats")
        assert server.metric("millstream_heartbeat_latency_seconds", model_name="tiny") != warm_up_latency
        assert server.metric("millstream_heartbeat_age_seconds", model_name="tiny") < 30.0
        for name in (
            "vllm:prompt_tokens_total",
            "vllm:generation_tokens_total",
            "vllm:e2e_request_latency_seconds_count",
        ):
            assert server.metric(name, model_name="tiny") == 0.0
        assert server.metric("vllm:num_requests_running", model_name="tiny") == 0.0
        assert server.metric("vllm:kv_cache_usage_perc", model_name="tiny") == 0.0


def test_metrics_count_what_users_did(tiny_model: Path) -> None:
    with serving(tiny_model) as server:
        server.wait_ready()
        usage = server.post(CHAT, chat_body(max_tokens=7)).json()["usage"]
        assert usage["completion_tokens"] == 7
        expected = {
            "vllm:prompt_tokens_total": usage["prompt_tokens"],
            "vllm:generation_tokens_total": 7,
            "vllm:time_to_first_token_seconds_count": 1,
            "vllm:inter_token_latency_seconds_count": 6,
            "vllm:e2e_request_latency_seconds_count": 1,
            "vllm:request_queue_time_seconds_count": 1,
            "vllm:request_prefill_time_seconds_count": 1,
            "vllm:request_decode_time_seconds_count": 1,
            "vllm:request_inference_time_seconds_count": 1,
            "vllm:request_time_per_output_token_seconds_count": 1,
            "vllm:request_prompt_tokens_sum": usage["prompt_tokens"],
            "vllm:request_generation_tokens_sum": 7,
            "vllm:request_max_num_generation_tokens_sum": 7,
            "vllm:request_params_max_tokens_sum": 7,
            "vllm:request_params_n_sum": 1,
            "vllm:iteration_tokens_total_count": 7,
            "vllm:iteration_tokens_total_sum": usage["prompt_tokens"] + 6,
            "vllm:prompt_tokens_cached_total": 0,
            "vllm:prefix_cache_queries_total": usage["prompt_tokens"],
            "vllm:prefix_cache_hits_total": 0,
            "vllm:num_requests_running": 0,
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": 0,
            "vllm:cache_config_info": 1,
            "vllm:num_preemptions_total": 0,
            "vllm:request_num_preemptions_count": 1,
            "vllm:request_num_preemptions_sum": 0,
            "millstream_recomputed_tokens_total": 0,
        }
        for name, value in expected.items():
            assert server.metric(name, model_name="tiny", engine="0") == value, name
            assert name in server.get("/metrics").text
        assert server.metric("vllm:request_success_total", finished_reason="length") == 1.0
        page = server.get("/metrics").text
        assert all(f'reason="{reason}"' in page for reason in ("capacity", "deferred"))
        server.post("/no/such/route", {})
        labels = {"method": "POST", "model_name": "tiny", "engine": "0"}
        assert server.metric("http_requests_total", handler=CHAT, status="2xx", **labels) == 1.0
        assert server.metric("http_requests_total", handler="none", status="4xx", **labels) == 1.0
        wait_for(
            lambda: server.metric("http_request_duration_seconds_count", handler=CHAT, **labels) == 1.0, "its duration"
        )


def test_probes_are_not_counted_as_requests(tiny_model: Path) -> None:
    with serving(tiny_model) as server:
        server.wait_ready()
        for path in ("/health", "/ready", "/metrics", "/load", "/version", "/v1/models"):
            assert server.get(path).status_code == 200
        counted = [line for line in server.get("/metrics").text.splitlines() if line.startswith("http_request")]
        assert any('handler="/v1/models"' in line for line in counted)
        probes = ("/health", "/ready", "/metrics", "/load", "/version")
        assert not any(f'handler="{probe}"' in line for line in counted for probe in probes)


def test_boards_of_vllm_find_their_names_and_labels(tiny_model: Path) -> None:
    """The names and label values that vLLM exports."""
    with serving(tiny_model) as server:
        server.wait_ready()
        for _ in range(2):
            server.post("/v1/completions", {"model": "tiny", "prompt": list(range(40)), "max_tokens": 1})
        assert server.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 48.0
        assert server.metric("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 32.0
        assert server.metric("vllm:prompt_tokens_cached_by_source_total", source="device") == 32.0
        assert server.metric("vllm:request_prefill_kv_computed_tokens_sum", model_name="tiny") == 48.0
        page = server.get("/metrics").text
        assert 'source="external_kv_transfer"' in page
        (info,) = [line for line in page.splitlines() if line.startswith("vllm:cache_config_info{")]
        for label in ('enable_prefix_caching="True"', 'gpu_memory_utilization="0.9"', 'cache_dtype="auto"'):
            assert label in info
        assert "\nprocess_resident_memory_bytes " in page
        assert "\nprocess_cpu_seconds_total " in page


def test_prefix_hits_are_told_in_usage_and_metrics(tiny_model: Path) -> None:
    with serving(tiny_model) as server:
        server.wait_ready()
        body = {"model": "tiny", "prompt": list(range(40)), "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        first, second = (server.post("/v1/completions", body).json() for _ in range(2))
        assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)] == [0, 32]
        assert first["choices"][0]["text"] == second["choices"][0]["text"]
        other = server.post("/v1/completions", {**body, "cache_salt": "another tenant"}).json()
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert server.metric("vllm:prefix_cache_queries_total", model_name="tiny") == 120
        assert server.metric("vllm:prefix_cache_hits_total", model_name="tiny") == 32
        assert server.metric("vllm:prompt_tokens_cached_total", model_name="tiny") == 32
    with serving(tiny_model, enable_prefix_caching=False) as server:
        server.wait_ready()
        answers = [server.post("/v1/completions", body).json() for _ in range(2)]
        assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers] == [0, 0]
        assert answers[0]["choices"][0]["text"] == first["choices"][0]["text"]


def test_the_choices_of_one_prompt_share_its_blocks(tiny_model: Path) -> None:
    with serving(tiny_model) as server:
        server.wait_ready()
        body = {"model": "tiny", "prompt": list(range(40)), "max_tokens": 2, "n": 4, "seed": 1}
        assert len(server.post("/v1/completions", body).json()["choices"]) == 4
        assert server.metric("vllm:prefix_cache_hits_total", model_name="tiny") == 3 * 32
        assert server.metric("vllm:request_params_n_sum", model_name="tiny") == 4


def test_a_silent_stream_is_kept_alive_with_comments(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SSE_KEEP_ALIVE_SECONDS", 0.05)
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make) as server:
        server.wait_ready()
        slow.gate.clear()
        with events_of(server, chat_body(max_tokens=3)) as events:
            assert [next(events), next(events)] == [": keep-alive"] * 2
            slow.gate.set()
            received = [event for event in events if event != ": keep-alive"]
        assert received[-1] == "[DONE]"
        slow.gate.clear()
        with events_of(server, chat_body(max_tokens=1500)) as events:  # the client leaves in the silence
            next(events)
        wait_for(lambda: server.server.service.admission.in_flight == 0, "its place to be free")
        slow.gate.set()
        wait_for(lambda: slow.engine.stats().kv_blocks_used == 0, "its KV blocks to be free")


def test_many_clients_that_come_and_go_leave_the_engine_clean(tiny_model: Path) -> None:
    slow = SlowSteps()
    with serving(tiny_model, make_engine=slow.make, max_num_seqs=8) as server:
        server.wait_ready()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=60) as client:

            def visit(number: int) -> None:
                with client.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": "x" * number}],
                    max_tokens=5 + 3 * number,
                    stream=True,
                ) as stream:
                    for received, _ in enumerate(stream):
                        if number % 3 and received > number:
                            return  # two of three leave early

            with ThreadPoolExecutor(16) as pool:
                list(pool.map(visit, range(48)))
        wait_for(lambda: server.server.service.admission.in_flight == 0, "every place to be free")
        wait_for(lambda: slow.engine.stats().kv_blocks_used == 0, "every KV block to be free")
        slow.engine.check_integrity()  # type: ignore[attr-defined]
