"""A start with fewer layers."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hack.training.layer_dropping import drop_layers, kept_layers


@pytest.fixture(scope="module")
def three_layers() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2)
    ).eval()


@pytest.mark.parametrize(
    ("num_layers", "num_kept", "kept"), [(3, 2, [0, 2]), (3, 1, [0]), (12, 4, [0, 4, 7, 11]), (5, 5, [0, 1, 2, 3, 4])]
)
def test_evenly_spaced_layers_stay(num_layers: int, num_kept: int, kept: list[int]) -> None:
    assert kept_layers(num_layers, num_kept) == kept


def test_what_is_left_is_the_model_without_the_others(three_layers: LlamaForCausalLM) -> None:
    ids = torch.arange(1, 9)[None]
    model = drop_layers(copy.deepcopy(three_layers), 2)
    hidden = three_layers.model.embed_tokens(ids)
    angles = three_layers.model.rotary_emb(hidden, torch.arange(8)[None])
    for index in (0, 2):
        found = three_layers.model.layers[index](hidden, position_embeddings=angles)
        hidden = found[0] if isinstance(found, tuple) else found
    expected = three_layers.lm_head(three_layers.model.norm(hidden))
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
    torch.testing.assert_close(model.generate(ids, max_new_tokens=4, do_sample=False)[:, :8], ids)  # with a KV cache
    assert model.config.num_hidden_layers == 2


def test_a_model_with_no_more_layers_stays_as_it_is(three_layers: LlamaForCausalLM) -> None:
    before = [*three_layers.model.layers]
    assert [*drop_layers(three_layers, 3).model.layers] == before
