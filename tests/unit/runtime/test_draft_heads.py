"""The names of tensors say whether they are a draft head's, and which; what decides its size is in the answer."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_runtime.draft_head_tensors import EAGLE1, EAGLE3, MEDUSA
from millstream_runtime.draft_heads import describe_head

LAYER = {"hidden_size": 8, "vocab_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
PUBLISHED = {"fc.weight": (8, 16), "layers.0.mlp.up_proj.weight": (16, 8), "embed_tokens.weight": (32, 8)}
SPECULATORS = {"fusion_fc.weight": (8, 16), "transformer.mlp.up_proj.weight": (16, 8)}
THREE = {"fc.weight": (8, 24), "midlayer.hidden_norm.weight": (8,), "lm_head.weight": (16, 8)}
TABLES = {"d2t": (16,), "t2d": (32,), "embed_tokens.weight": (32, 8)}
HEADS = {"0.0.linear.weight": (8, 8), "0.0.linear.bias": (8,), "0.1.weight": (32, 8)}
MODEL = {"model.embed_tokens.weight": (32, 8), "model.layers.0.mlp.up_proj.weight": (16, 8), "lm_head.weight": (32, 8)}
Shapes = dict[str, tuple[int, ...]]


@pytest.mark.parametrize(
    ("config", "shapes", "kind", "elements"),
    [
        (LAYER, PUBLISHED, EAGLE1, 256),
        ({"speculators_model_type": "eagle", "transformer_layer_config": LAYER}, SPECULATORS, EAGLE1, 256),
        (LAYER, THREE, EAGLE3, 328),
        (LAYER, THREE | TABLES, EAGLE3, 328),
        (LAYER, PUBLISHED | {"layers.0.self_attn.rotary_emb.inv_freq": (4,)}, EAGLE1, 256),
        (LAYER | {"architectures": ["LlamaForCausalLMEagle3"]}, PUBLISHED, EAGLE3, 256),
        ({"medusa_num_heads": 1}, HEADS, MEDUSA, 328),
        ({"medusa_num_heads": 1}, {f"medusa_head.{name}": shape for name, shape in HEADS.items()}, MEDUSA, 328),
    ],
)
def test_a_head_is_known_by_its_tensors(config: dict[str, Any], shapes: Shapes, kind: str, elements: int) -> None:
    found = describe_head(config, shapes)
    assert found is not None
    assert (found["kind"], found["elements"], found["unsupported"]) == (kind, elements, None)
    assert (found["config"]["hidden_size"], found["config"]["vocab_size"]) == (8, 32)


@pytest.mark.parametrize("shapes", [MODEL, {}, {"fc.weight": (8, 16)}, MODEL | {"score.fc.weight": (1, 8)}])
def test_a_model_is_no_head(shapes: Shapes) -> None:
    assert describe_head(LAYER, shapes) is None


@pytest.mark.parametrize(
    ("config", "shapes", "said"),
    [
        ({"layernorms": True}, PUBLISHED, "layernorms True"),
        ({"speculators_model_type": "mlp"}, PUBLISHED, "speculators_model_type 'mlp'"),
        ({"quantization_config": {"bits": 4}}, PUBLISHED, "quantization_config"),
        ({"norm_before_fc": True}, THREE, "norm_before_fc True"),
        ({"num_hidden_layers": 2}, THREE, "num_hidden_layers 2"),
        ({"medusa_num_heads": 1, "quantization_config": {"bits": 4}}, HEADS, "quantization_config"),
    ],
)
def test_what_the_runtime_refuses_is_named(config: dict[str, Any], shapes: Shapes, said: str) -> None:
    found = describe_head(LAYER | config, shapes)
    assert found is not None
    assert found["unsupported"] == said


def test_layers_of_the_target_are_in_the_answer_whole_or_as_they_are() -> None:
    for given, kept in (([1, 2, 3], [1, 2, 3]), (list(range(9)), list(range(8))), ("all", "all")):
        for config in (
            {"eagle_aux_hidden_state_layer_ids": given},
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": given}},
        ):
            found = describe_head(LAYER | config, THREE)
            assert found is not None
            assert found["config"]["eagle_aux_hidden_state_layer_ids"] == kept
