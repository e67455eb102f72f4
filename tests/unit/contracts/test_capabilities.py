"""What the contract says the runtime can run has an answer for doing nothing, and no method that it lacks."""

from __future__ import annotations

from millstream_runtime.config import CAPABILITIES
from millstream_runtime.quantization_config.scheme import ROUNDED_METHOD


def test_doing_nothing_is_always_possible() -> None:
    assert "None" in CAPABILITIES.quantization_methods
    assert "None" in CAPABILITIES.cpu_quantization_methods
    assert "None" in CAPABILITIES.kv_cache_methods
    assert "None" in CAPABILITIES.cpu_kv_cache_methods
    assert "Disabled" in CAPABILITIES.speculation_methods
    assert "Disabled" in CAPABILITIES.cpu_speculation_methods
    assert CAPABILITIES.online_quantization_methods <= CAPABILITIES.quantization_methods


def test_what_weights_are_rounded_to_is_served_on_every_device() -> None:
    rounded = CAPABILITIES.rounded_quantization_methods
    assert rounded == {ROUNDED_METHOD}
    assert rounded <= CAPABILITIES.quantization_methods & CAPABILITIES.cpu_quantization_methods
