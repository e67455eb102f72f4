"""What vLLM exports (`tests/data/vllm_metrics.json`, from its source) is exported here or named as an exception."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from millstream_runtime.config import SpeculationMethod
from millstream_runtime.engine.request import FinishReason
from millstream_runtime.server.operations.preemption_histogram import preemption_histogram
from tests.support.chat_streams import CHAT, chat_body
from tests.support.server_thread import serving

FIXTURE: dict[str, Any] = json.loads((Path(__file__).parents[3] / "data" / "vllm_metrics.json").read_text())
EXPECTED: dict[str, dict[str, Any]] = {one["name"]: one for one in FIXTURE["metrics"]}

NO_CONNECTOR = "no keys and values come from other machines or from host memory"
NO_SLEEP = "there is no sleep mode"
NOT_BY_DEFAULT = "vLLM has it only behind a flag or variable of its own"
NOT_SERVED = "this server does not serve that kind of request or model"
EXCEPTIONS = {
    "http_request_duration_highr_seconds": "http_request_duration_seconds has the same by route",
    "http_request_size_bytes": "no published board shows sizes of bodies",
    "http_response_size_bytes": "no published board shows sizes of bodies",
    "vllm:corrupted_requests": NOT_BY_DEFAULT + "; request_success{finished_reason=error} counts them here",
    "vllm:diffusion_num_canvas_positions": NOT_SERVED,
    "vllm:diffusion_num_committed_tokens": NOT_SERVED,
    "vllm:diffusion_num_denoising_steps": NOT_SERVED,
    "vllm:engine_sleep_state": NO_SLEEP,
    "vllm:estimated_flops_per_gpu": NOT_BY_DEFAULT,
    "vllm:estimated_read_bytes_per_gpu": NOT_BY_DEFAULT,
    "vllm:estimated_write_bytes_per_gpu": NOT_BY_DEFAULT,
    "vllm:external_prefix_cache_hits": NO_CONNECTOR,
    "vllm:external_prefix_cache_queries": NO_CONNECTOR,
    "vllm:kv_block_idle_before_evict_seconds": NOT_BY_DEFAULT,
    "vllm:kv_block_lifetime_seconds": NOT_BY_DEFAULT,
    "vllm:kv_block_reuse_gap_seconds": NOT_BY_DEFAULT,
    "vllm:lora_requests_info": "there are no LoRA adapters",
    "vllm:mm_cache_hits": "there are no images",
    "vllm:mm_cache_queries": "there are no images",
    "vllm:num_requests_kv_fetch_by_stage": NO_CONNECTOR,
    "vllm:rl_weight_update_operation_duration_seconds": "weights are never replaced in a running engine",
    "vllm:rl_weight_update_operations_in_flight": "weights are never replaced in a running engine",
    "vllm:sleep_mode_operation_duration_seconds": NO_SLEEP,
    "vllm:sleep_mode_operations_in_flight": NO_SLEEP,
    "vllm:tool_call_parser_invocations": "there are no tools",
    "vllm:watermark_requests": NOT_BY_DEFAULT,
    "vllm:websocket_connection_duration_seconds": NOT_SERVED,
    "vllm:websocket_connections": NOT_SERVED,
    "vllm:websocket_connections_active": NOT_SERVED,
}
NO_MAMBA = "of state-space models"
LABEL_EXCEPTIONS = {
    "_block_size_resolved": "a private field of vLLM",
    "enable_mamba_shared_prefix_checkpoint": NO_MAMBA,
    "kv_cache_dtype_skip_layers": "all layers are stored alike",
    "kv_cache_layout": "vLLM's names for its own layouts",
    "kv_cache_max_concurrency": "how many requests fit depends on their prefixes and windows: the plan has an estimate",
    "kv_offloading_backend": NO_CONNECTOR,
    "kv_sharing_fast_prefill": "no layers share keys and values",
    "mamba_block_size": NO_MAMBA,
    "mamba_cache_dtype": NO_MAMBA,
    "mamba_cache_mode": NO_MAMBA,
    "mamba_page_size_padded": NO_MAMBA,
    "mamba_ssm_cache_dtype": NO_MAMBA,
    "prefix_cache_retention_interval": "a setting of vLLM's eviction",
    "prefix_match_unit": "a hit ends with a block",
    "replayssm_buffer_len": NO_MAMBA,
    "skip_page_size_padded": "all layers are stored alike",
    "sliding_window": "layers of one model may have several",
    "swa_bounded_replay": "a setting of one model of vLLM's",
    "use_kda_recoverssm": NO_MAMBA,
    "use_replayssm": NO_MAMBA,
}


@pytest.fixture(scope="module")
def exported(tiny_model: Path) -> dict[str, Metric]:
    """All metrics of a server that speculates and has answered, by name."""
    with serving(tiny_model, speculation_method=SpeculationMethod.N_GRAM) as server:
        server.wait_ready()
        server.post(CHAT, chat_body(max_tokens=3))
        return {family.name: family for family in text_string_to_metric_families(server.get("/metrics").text)}


def test_every_metric_of_vllm_is_exported_or_an_exception(exported: dict[str, Metric]) -> None:
    assert {name for name in EXPECTED if name not in exported} == EXCEPTIONS.keys()


def test_types_are_those_of_vllm(exported: dict[str, Metric]) -> None:
    found = {name: exported[name].type for name in EXPECTED if name in exported}
    assert found == {name: EXPECTED[name]["type"] for name in found}


def test_labels_are_those_of_vllm(exported: dict[str, Metric]) -> None:
    """More of them do no harm."""
    lacking = {
        name: set(one["labels"]) - set(exported[name].samples[0].labels)
        for name, one in EXPECTED.items()
        if name in exported
    }
    assert {name: labels for name, labels in lacking.items() if labels} == {}


def test_the_labels_of_the_cache_are_those_of_vllm_or_an_exception(exported: dict[str, Metric]) -> None:
    (info,) = exported["vllm:cache_config_info"].samples
    assert {label for label in FIXTURE["cache_config_labels"] if label not in info.labels} == LABEL_EXCEPTIONS.keys()
    assert info.labels["block_size"] == info.labels["hash_block_size"] == "16"
    assert info.labels["user_specified_block_size"] == "False"
    tokens = int(info.labels["kv_cache_size_tokens"])
    assert tokens == int(info.labels["num_gpu_blocks"]) * 16 > 0


def test_finish_reasons_are_words_of_vllm() -> None:
    assert {reason.value for reason in FinishReason} == {"stop", "length", "abort", "error"}


def test_preemptions_are_counted_by_request() -> None:
    samples = {
        (one.name.removeprefix("vllm:request_num_preemptions"), one.labels.get("le")): one.value
        for one in preemption_histogram({"engine": "0"}, {0: 7, 2: 1, 30: 2}).samples
    }
    assert samples["_bucket", "0.0"] == samples["_bucket", "1.0"] == 7
    assert samples["_bucket", "2.0"] == samples["_bucket", "20.0"] == 8
    assert samples["_bucket", "+Inf"] == samples["_count", None] == 10
    assert samples["_sum", None] == 62
