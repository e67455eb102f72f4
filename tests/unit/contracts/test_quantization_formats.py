"""Every quantization format of the API has its place in each step of planning, and the runtime claims no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream_operator.api.optimization import KVCacheMethod, QuantizationMethod
from millstream_operator.catalog.checkpoint_quantization import read_quantization
from millstream_operator.catalog.gpu import MINIMUM_SM, MINIMUM_SM_KV_CACHE
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.planning.choices.quantization import FOUR_BIT, NEEDS_QUANTIZED_CHECKPOINT
from millstream_operator.planning.facts import EVERYTHING
from millstream_operator.planning.sizing.weights import linear_bytes, weight_format
from millstream_runtime.config import CAPABILITIES, KVCacheDType
from millstream_runtime.errors import FailureReason, RuntimeFailure
from millstream_runtime.models.registry import load_model_config

METHODS = {method.value for method in QuantizationMethod if method is not QuantizationMethod.AUTO}
KV_METHODS = {method.value for method in KVCacheMethod if method is not KVCacheMethod.AUTO}
# What a checkpoint of the format says of itself in config.json; the others are no checkpoints of Hugging Face.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "FP8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "INT8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "NF4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "GGUF": {"quant_method": "gguf", "elements": {"Q4_K": 1 << 20, "F32": 1 << 10}},  # from a file's header
}
WITHOUT_CHECKPOINT = {"None", "RTN"}


def test_every_format_can_be_planned_and_has_a_least_gpu() -> None:
    assert METHODS == EVERYTHING.quantization_methods == EVERYTHING.cpu_quantization_methods == MINIMUM_SM.keys()
    assert KV_METHODS == EVERYTHING.kv_cache_methods == MINIMUM_SM_KV_CACHE.keys()
    assert KV_METHODS == EVERYTHING.cpu_kv_cache_methods == {stored.method for stored in KVCacheDType}


@pytest.mark.parametrize("method", sorted(METHODS - {"None"}))
def test_a_format_is_smaller_than_16_bit_and_called_four_bit_where_it_is(method: str) -> None:
    shape = known_shape("meta-llama/Meta-Llama-3-8B")
    assert shape is not None
    stored = weight_format(shape, method)
    assert stored.method == method, "planning/sizing/weights.py does not know the format"
    bits = linear_bytes(1 << 20, stored) * 8 / (1 << 20)
    assert bits < 16
    assert (bits < 6) == (method in FOUR_BIT)


def test_a_format_comes_from_the_checkpoint_or_is_made_while_loading() -> None:
    assert METHODS - {"None"} == set(NEEDS_QUANTIZED_CHECKPOINT) | EVERYTHING.online_quantization_methods


def test_the_runtime_claims_no_format_that_the_api_lacks() -> None:
    assert CAPABILITIES.quantization_methods | CAPABILITIES.cpu_quantization_methods <= METHODS
    assert CAPABILITIES.kv_cache_methods | CAPABILITIES.cpu_kv_cache_methods <= KV_METHODS


def test_every_format_has_a_checkpoint_that_the_catalogue_reads() -> None:
    assert CHECKPOINTS.keys() | WITHOUT_CHECKPOINT == METHODS
    for method, quantization in CHECKPOINTS.items():
        found = read_quantization({"quantization_config": quantization})
        assert found is not None
        assert found.method == method


@pytest.mark.parametrize("method", CHECKPOINTS)
def test_the_runtime_reads_the_formats_that_it_claims_and_refuses_the_others(method: str, tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 128,
        "quantization_config": CHECKPOINTS[method],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    if method in CAPABILITIES.quantization_methods | CAPABILITIES.cpu_quantization_methods:
        load_model_config(tmp_path)
        return
    with pytest.raises(RuntimeFailure) as refused:
        load_model_config(tmp_path)
    assert refused.value.reason is FailureReason.UNSUPPORTED_BY_RUNTIME
