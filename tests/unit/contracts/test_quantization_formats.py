"""Every quantization format of the API has its place in each step of planning, and the runtime claims no other."""

from __future__ import annotations

import pytest

from millstream_operator.api.optimization import KVCacheMethod, QuantizationMethod
from millstream_operator.catalog.gpu import MINIMUM_SM, MINIMUM_SM_KV_CACHE
from millstream_operator.catalog.known_models import known_shape
from millstream_operator.planning.choices.quantization import FOUR_BIT, NEEDS_QUANTIZED_CHECKPOINT
from millstream_operator.planning.facts import EVERYTHING
from millstream_operator.planning.sizing.weights import linear_bytes, weight_format
from millstream_runtime.config import CAPABILITIES

METHODS = {method.value for method in QuantizationMethod if method is not QuantizationMethod.AUTO}
KV_METHODS = {method.value for method in KVCacheMethod if method is not KVCacheMethod.AUTO}


def test_every_format_can_be_planned_and_has_a_least_gpu() -> None:
    assert METHODS == EVERYTHING.quantization_methods == MINIMUM_SM.keys()
    assert KV_METHODS == EVERYTHING.kv_cache_methods == MINIMUM_SM_KV_CACHE.keys()


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
    assert CAPABILITIES.quantization_methods <= METHODS
    assert CAPABILITIES.kv_cache_methods <= KV_METHODS
