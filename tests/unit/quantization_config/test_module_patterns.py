"""Which modules the lists of a quantization_config mean."""

from __future__ import annotations

import pytest

from millstream_runtime.quantization_config.module_patterns import is_named, unreadable

DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        (DOWN, True),
        ("model.layers.1.mlp", True),
        ("down_proj", True),
        ("mlp", True),
        ("layers.1", True),
        ("model.layers.10.mlp", False),
        ("own_proj", False),
        ("gate", False),
        ("model.layers.1.", True),
        (".mlp.", True),
        ("model.layers.*.mlp", True),
        ("model.*.self_attn", False),
        ("model.layers.*1*.mlp", True),
        ("model.layers.?.mlp", False),
        ("*down", False),
        ("", False),
        ("lm_head", False),
        ("Linear", True),
        ("re:.*down_proj", True),
        ("re:.*down_proj$", True),
        ("re:model.layers.1.*", True),
        (r"re:model\.layers\.\d+\.mlp\.(gate|up|down)_proj$", True),
        (r"re:model\.layers\.\d+\.mlp\.(gate|up)_proj$", False),
        ("re:layers", False),
        ("language_model.model.layers.1.mlp", True),
        ("model.language_model.layers.1.mlp.down_proj", True),
        (r"re:language_model\.model\.layers.*", True),
        ("vision_tower.layers.1.mlp.down_proj", False),
    ],
)
def test_a_pattern_means_a_module(pattern: str, named: bool) -> None:
    assert unreadable([pattern]) is None
    assert is_named(DOWN, [pattern]) is named


@pytest.mark.parametrize("pattern", ["re:(a+)+$", "re:(?=x)", "re:[a-z]{9}", "x" * 201, "re:" + "(a|b)" * 9])
def test_a_regular_expression_of_another_form_is_not_read(pattern: str) -> None:
    assert unreadable(["lm_head", pattern]) == pattern[:80]
